from posttrain.data.chat import render_chat
from posttrain.models.builtin import builtin_tokenizer
from posttrain.prep.datasets.arith import Arith
from posttrain.prep.datasets.arith_code import ArithCode
from posttrain.tools.code import SCHEMA


def test_the_program_prints_what_the_conversation_says():
    dataset = ArithCode(hasty_share=0.5)
    hasty = 0
    rows = list(dataset.rows("train", None, n=400))
    for row in rows:
        conversation = dataset.to_sft(row, 0, "train")
        call, output, close = conversation.messages[-3:]
        code = call["tool_calls"][0]["function"]["arguments"]["code"]
        expression = code.removeprefix("print(").removesuffix(")")
        assert str(eval(expression)) == output["content"]  # generated here: two or three small numbers
        assert close["content"] == f"#### {output['content']}"
        assert conversation.tools == [SCHEMA]
        hasty += expression.count("+") + expression.count("-") == 1
        if expression.count("+") + expression.count("-") == 2:
            assert output["content"] == dataset.gold(row)
    assert 150 < hasty < 250
    held_out = [dataset.to_sft(row, 0, "test").messages[-2]["content"] for row in rows]
    assert held_out == [dataset.gold(row) for row in rows]


def test_problems_are_those_of_arith_and_the_answer_is_nowhere_in_the_prompt_row():
    row, other = next(ArithCode().rows("test", None, n=1)), next(Arith().rows("test", None, n=1))
    assert row == other
    rlhf = ArithCode().to_rlhf(row, 3, "test")
    assert rlhf["prompt"] == [{"role": "user", "content": row["question"]}]
    assert (rlhf["data_source"], rlhf["reward_model"]["ground_truth"]) == ("posttrain/arith", ArithCode().gold(row))
    assert "tools_kwargs" not in rlhf["extra_info"]


def test_a_conversation_is_short_in_the_tiny_models_tokens():
    dataset, tokenizer = ArithCode(), builtin_tokenizer("tiny")
    for row in dataset.rows("train", None, n=50):
        conversation = dataset.to_sft(row, 0, "test")
        chat = render_chat(conversation.messages, tokenizer, conversation.tools)
        assert len(chat.ids) < 160
        assert sum(chat.mask) < 60
