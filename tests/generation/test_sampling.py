import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.generation.sampling import Choice, sample

LOGITS = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))


def shares(choice, num=4000):
    keys = jax.random.split(jax.random.key(0), num)
    tokens = jax.jit(jax.vmap(lambda key: sample(LOGITS, key, choice)[0]))(keys)
    return np.bincount(np.asarray(tokens), minlength=4) / num


def test_greedy_takes_the_most_likely():
    assert sample(LOGITS, jax.random.key(0), Choice()).tolist() == [0]


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        (Choice(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (Choice(temperature=0.5), np.array([16, 9, 4, 1]) / 30),
        (Choice(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Choice(temperature=1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Choice(temperature=1.0, top_p=0.4), [1, 0, 0, 0]),
        (Choice(temperature=1.0, top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_tokens_have_the_probabilities_asked_for(choice, want):
    np.testing.assert_allclose(shares(choice), want, atol=0.03)
    assert (shares(choice)[np.asarray(want) == 0] == 0).all()
