import dataclasses

from mtuner_jax.configs import ConfigError
from mtuner_jax.settings import programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A program's settings.

    Attributes:
      runs: Some words.
      sizes: Some numbers.
    """

    runs: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (8,)


def run(*argv, do):
    return programs.run(argv, Asked, do, positional="runs")


def test_words_before_the_first_flag_are_the_positional_setting():
    got = []
    assert run("a", "b", "--sizes", "1", "2", do=got.append) == 0
    assert run("--sizes", "3,4", do=got.append) == 0
    assert run("--sizes=[]", do=got.append) == 0
    assert got == [
        Asked(runs=("a", "b"), sizes=(1, 2)),
        Asked(sizes=(3, 4)),
        Asked(sizes=()),
    ]


def test_the_exit_code_is_the_programs_own():
    assert run(do=lambda asked: 3) == 3


def test_what_a_user_can_change_is_told_and_the_code_is_2(capsys):
    def refuse(asked):
        raise ConfigError(f"sizes={asked.sizes}: too many")

    assert run("--sizes", "1,2", do=refuse) == programs.BAD_INPUT == 2
    assert capsys.readouterr().err == "error: sizes=(1, 2): too many\n"
    assert run("--sizes", "1,x", do=refuse) == 2
    assert "sizes[1]='x' is a str, expected int" in capsys.readouterr().err
