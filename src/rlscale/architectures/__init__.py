"""Model families: their Hugging Face names, fields and layers, and the backends that run them. Imports no torch.

families/<model_type>.py   one file per family: a `Family` with its table of weight names
family                     Family, find_family, load_families
weight_names               Weight, HfNames: a weight under its Hugging Face and its Megatron-core name
decoder_weights            weights that Llama-like families share
hf_config                  config.json -> architecture fields (keys of the config group `model`)
architecture               Architecture: the shape of a decoder, its parameters and operations
megatron_fields            config.json -> fields of Megatron-core's TransformerConfig, and contradictions
sigmoid_fields             the same for experts chosen by sigmoid scores
mla_fields                 the same for multi-head latent attention
"""
