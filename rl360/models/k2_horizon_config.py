"""K2 Horizon's configuration for transformers 4 and 5: Llama's, and the number of groups of its norms.

In: a config.json of model_type k2_horizon. Out: `K2HorizonConfig`. This file stands alone: `rl360 model prepare` copies
it into a checkpoint as configuration_k2_horizon.py, for readers that do not have RL360. Keys that Llama does not have
stay as they are, as attributes; whether they ask for something that is not computed is rl360.models.architecture's
question.
"""

from transformers import LlamaConfig


class K2HorizonConfig(LlamaConfig):
    """Defaults are Llama's. `layernorm_num_groups`: each norm divides the hidden values in this many slices apart."""

    model_type = "k2_horizon"
    layernorm_num_groups: int = 1
