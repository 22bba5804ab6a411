"""Profile of a machine, sent from one process to another."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.profiles import RATES, made_up_profile

from mlx_ring.core.errors import ProtocolError
from mlx_ring.host.machine_profile import PROFILE_VERSION, MachineProfile


def test_a_profile_survives_json() -> None:
    profile = made_up_profile()
    assert MachineProfile.from_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, f"of version 0; this version reads {PROFILE_VERSION}"),
        ({"rates": []}, "at rates"),
        ({"memory_bytes": -1}, "at memory_bytes"),
        ({"seconds": "NaN"}, "at seconds"),
        ({"speed": 3}, "at speed"),
        ({"costs": None}, "at costs"),
    ],
)
def test_an_invalid_profile_is_refused_with_the_place(change: dict[str, Any], message: str) -> None:
    values = json.loads(made_up_profile().model_dump_json()) | change
    with pytest.raises(ProtocolError, match=message):
        MachineProfile.from_json(json.dumps(values))


def test_a_profile_with_scattered_times_is_not_steady() -> None:
    shaky = RATES[0].model_copy(update={"spread": 0.4})
    assert made_up_profile().is_steady
    assert not made_up_profile(rates=(*RATES, shaky)).is_steady


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rates": 3}'])
def test_text_that_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="This is not a machine's profile"):
        MachineProfile.from_json(text)
