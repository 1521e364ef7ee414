import math

import jax
import pytest

from models import llama, llama_hf_names, llama_sizes

# As their model cards or their checkpoints' index files state.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-30b": 32_528_943_616,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", llama_sizes.SIZES)
def test_number_of_parameters_is_the_published_one(name):
    config = llama_sizes.SIZES[name]
    assert config.num_parameters == PARAMETERS[name]
    shapes = jax.tree.leaves(
        llama.Llama(config).shapes(), is_leaf=lambda node: isinstance(node, tuple)
    )
    assert sum(math.prod(shape) for shape in shapes) == PARAMETERS[name]
    tensors = llama_hf_names.tensors(config)
    assert sum(math.prod(tensor.shape) for tensor in tensors) == PARAMETERS[name]


def test_30b_shape_is_the_papers():
    config = llama_sizes.SIZES["llama2-30b"]
    sizes = (config.num_layers, config.hidden_size, config.num_heads)
    assert (*sizes, config.intermediate_size) == (60, 6656, 52, 17920)
