"""SGLang on a CPU from pip wheels: a platform plugin, and an import hook that torchvision needs without CUDA."""
