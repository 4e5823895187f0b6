"""Changes to vLLM's workers that need no model."""

import threading

import pytest

pytestmark = pytest.mark.vllm


def test_a_worker_finds_a_call_that_it_was_not_told_of(monkeypatch):
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from posttrain.weight_sync import vllm_worker

    # As in vLLM up to 0.26.
    monkeypatch.setattr(MessageQueue.ReadTimeoutWithWarnings, "timeout_ms", lambda self: None)
    monkeypatch.setattr(vllm_worker, "_LOOK_MS", 50)
    vllm_worker._look_for_calls()
    calls = MessageQueue(n_reader=1, n_local_reader=1)
    worker = MessageQueue.create_from_handle(calls.export_handle(), 0)
    worker._spin_condition.busy_loop_s = 0.0  # from now on it waits for a message at once
    connecting = threading.Thread(target=calls.wait_until_ready)
    connecting.start()
    worker.wait_until_ready()
    connecting.join()
    monkeypatch.setattr(calls._spin_condition, "notify", lambda: None)  # messages get lost
    found = []
    waiting = threading.Thread(target=lambda: found.append(worker.dequeue(indefinite=True)), daemon=True)
    waiting.start()
    calls.enqueue("wake_up")
    waiting.join(60)
    assert found == ["wake_up"]
