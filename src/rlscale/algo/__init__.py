"""The mathematics: pure functions of tensors and numbers, without config, files, logging or collectives."""
