"""Answers questions with a model, an adapter or a run, or talks in the terminal.

python scripts/generate.py --run runs/default --prompt "What does str.join do?"
python scripts/generate.py --model merged/ --temperature 0.7 --top_p 0.9
python scripts/generate.py --model model.gguf --prompts questions.txt
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mtuner_jax.configs import GenerateConfig
from mtuner_jax.settings import programs


def main(argv: list[str]) -> int:
    """Answers; returns the exit code."""
    options = {"description": __doc__, "positional": "prompt"}
    return programs.run(argv, GenerateConfig, generate, **options)


def generate(config: GenerateConfig) -> None:
    """Answers; JAX is imported here, so that a wrong setting is told without it."""
    from models import llama_family
    from mtuner_jax.runs import generating
    from mtuner_jax.training import logs

    asked = generating.conversations(config)
    with logs.to_console():
        answers = generating.answerer(config, llama_family.FAMILY)
    for messages in asked:
        print(f"> {messages[-1]['content']}")
        for piece in answers.stream(answers.renderer.prompt_ids(messages)):
            print(piece, end="", flush=True)
        print("\n")
    if not asked:
        print("Ask something; an empty line is ignored, Ctrl-D ends.")
        generating.talk(
            config,
            answers,
            ask=lambda: input("> "),
            say=lambda piece: print(piece, end="", flush=True),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
