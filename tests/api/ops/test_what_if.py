"""`/cluster/what-if` over twins: one M4 Mac mini with 16 GB."""

from __future__ import annotations

import pytest
from tests.api.clients import Api, refusal


def test_a_machine_that_is_added_is_compared_with_the_cluster_as_it_is() -> None:
    reply = Api().post(
        "/cluster/what-if", {"add": ["m3-ultra-512"], "link": "tb5-rdma", "context_tokens": 4096}
    )
    before, after = reply.json()["outcomes"]
    assert (before["label"], after["label"]) == ("now", "with m3-ultra-512 over tb5-rdma")
    assert after["users"] > 10 * before["users"] > 0
    assert after["tokens_per_s"] > before["tokens_per_s"]


def test_the_model_may_be_served_or_a_short_name_or_any_popular_one() -> None:
    api = Api()

    def labels(**body: object) -> list[str]:
        return [one["label"] for one in api.post("/cluster/what-if", body).json()["outcomes"]]

    assert labels() == ["org/twin"]
    assert labels(model="twin") == ["org/twin"]
    assert labels(model="llama-70b") == ["Llama-3.3-70B 4-bit"]
    assert len(labels(what_fits=True)) > 30


def test_bits_are_compared_and_curves_are_drawn_only_when_asked_for() -> None:
    api = Api()
    assert api.post("/cluster/what-if", {}).json()["curves"] is None
    reply = api.post("/cluster/what-if", {"kv_bits": [16, 4], "curves": True}).json()
    assert [one["kv_bits"] for one in reply["outcomes"]] == [16, 4]
    assert reply["curves"]["by_users"][0]["at"] == 1


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        (
            {"add": ["m3-ultr-512"]},
            400,
            "add",
            "The machine m3-ultr-512 is unknown; the nearest known ones are",
        ),
        ({"add": ["m4-16"], "link": "tb9"}, 400, "link", "The link tb9 is unknown; known links are tb5"),
        ({"link": "tb5"}, 400, "link", "link is tb5, but no machine is added"),
        (
            {"what_fits": True, "model": "twin"},
            400,
            "model",
            "what_fits lists popular models; leave twin out.",
        ),
        ({"add": ["m4-16"] * 17}, 400, "add", "16"),
        ({"kv_bits": [5]}, 400, "kv_bits[0]", "4, 8 or 16"),
        ({"context_tokens": 0}, 400, "context_tokens", "1"),
        ({"model": "lama"}, 404, None, "There is no model 'lama'"),
    ],
)
def test_a_wrong_question_is_refused_in_one_sentence(
    body: dict[str, object], status: int, param: str | None, said: str
) -> None:
    found, message = refusal(Api().post("/cluster/what-if", body), status)
    assert said in message
    assert found == param
