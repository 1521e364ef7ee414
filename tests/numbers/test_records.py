import dataclasses
import enum
import json

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.numbers import records


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wheel:
    size: int
    colour: Colour = Colour.RED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cart:
    name: str
    wheels: tuple[Wheel, ...]
    speed: float
    pair: tuple[int, float] = (1, 2.0)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    open: bool = False
    owner: str | None = None


FORMAT = records.Format(what="cart", version=3, again="build it again")
CART = Cart(
    name="c",
    wheels=(Wheel(size=1), Wheel(size=2, colour=Colour.BLUE)),
    speed=0.123456789,
    notes={"a": "b"},
    owner="me",
)


def test_what_was_written_is_read_back_and_written_alike():
    text = FORMAT.to_json(CART)
    assert FORMAT.from_json(text, Cart) == CART
    assert FORMAT.to_json(FORMAT.from_json(text, Cart)) == text
    assert json.loads(text)["version"] == 3


def test_floats_are_rounded_where_that_is_asked_for():
    content = json.loads(FORMAT.to_json(CART, digits=3, indent=None))
    assert content["speed"] == 0.123
    assert content["wheels"][0]["size"] == 1


def test_fields_with_defaults_may_be_missing():
    text = json.dumps({"version": 3, "name": "c", "wheels": [{"size": 4}], "speed": 1})
    read = FORMAT.from_json(text, Cart)
    assert read.wheels == (Wheel(size=4),)
    assert read.owner is None


def changed(**changes):
    content = {**json.loads(FORMAT.to_json(CART)), **changes}
    return json.dumps({key: x for key, x in content.items() if x != "gone"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cart: not JSON: .*line 1"),
        ("[]", "cart: a JSON object, not list"),
        (changed(version=2), "cart version 2 is not 3; build it again"),
        (changed(version="gone"), "cart version None is not 3"),
        (changed(speed="gone"), "cart: misses the field speed; its fields are name"),
        (changed(hue=1), "cart: has the field hue; its fields are name"),
        (changed(name=1), "cart: name=1 is not a string"),
        (changed(speed="1"), "cart: speed='1' is not a number"),
        (changed(speed=True), "cart: speed=True is not a number"),
        (changed(open=1), "cart: open=1 is not true or false"),
        (changed(wheels=3), "cart: wheels=3 is not a list"),
        (changed(wheels=[3]), "cart: wheels=3 is not an object"),
        (changed(wheels=[{"size": True}]), "cart: size=True is not an integer"),
        (changed(wheels=[{"size": 1, "colour": []}]), r"colour=\[\]; one of red, blue"),
        (changed(pair=[1]), r"pair=\[1\] has not 2 entries"),
        (changed(pair=[1.5, 1]), "pair=1.5 is not an integer"),
        (changed(notes={"a": 1}), "notes=1 is not a string"),
        (changed(owner=1), "owner=1 is not a string"),
    ],
)
def test_what_is_no_such_file_is_an_error_that_names_field_and_value(text, message):
    with pytest.raises(ConfigError, match=message):
        FORMAT.from_json(text, Cart)
