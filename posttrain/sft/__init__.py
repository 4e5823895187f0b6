"""The command `sft`, and the loop over supervised batches that `prefer` shares."""
