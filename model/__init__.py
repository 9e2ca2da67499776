"""DeepSeek-VL2 as torch modules: pictures to tiles, messages to token ids, checkpoints to weights."""
