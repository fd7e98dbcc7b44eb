"""SGLang on a CPU from pip wheels alone: a platform plugin, and a hook without which torchvision does not import."""
