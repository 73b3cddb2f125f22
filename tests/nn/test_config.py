"""Configurations: defaults, faults reported together, head counts for world sizes; token layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.nn import ModelConfig, RopeScaling, TokenLayout, document_ids_from_lengths
from fusedtp.nn.heads import heads_split, sizes_that_split


def test_left_out_heads_are_filled_in() -> None:
    config = ModelConfig(hidden_size=96, num_attention_heads=6)
    assert (config.num_key_value_heads, config.head_dim) == (6, 16)
    assert ModelConfig(attention_bias=True).attention_output_bias is True
    assert ModelConfig(attention_bias=True, attention_output_bias=False).attention_output_bias is False


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(ValueError) as caught:
        ModelConfig(
            vocab_size=0, num_attention_heads=6, num_key_value_heads=4, head_dim=7, sliding_window=0,
            residual_dropout=1.0, dtype="int8", hidden_act="relu", rope_theta=0.0, num_hidden_layers=-1,
            rope_scaling=RopeScaling("linear", 0.0),
        )  # type: ignore[arg-type]  # fmt: skip
    message = str(caught.value)
    for name in (
        "vocab_size", "num_key_value_heads", "head_dim", "sliding_window", "residual_dropout", "dtype",
        "hidden_act", "rope_theta", "num_hidden_layers", "rope_scaling",
    ):  # fmt: skip
        assert name in message, name


@pytest.mark.parametrize("heads", [0, -1])
def test_no_heads_is_a_fault_and_no_crash(heads: int) -> None:
    with pytest.raises(ValueError, match="num_attention_heads"):
        ModelConfig(num_attention_heads=heads)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 12))
def test_ranks_share_heads_where_each_query_head_meets_its_kv_head(kv: int, group: int, size: int) -> None:
    heads = kv * group

    def works(size: int) -> bool:
        """By the definition: each rank has as many query heads, and as many kv heads or copies of a kv head."""
        if heads % size:
            return False
        mine = heads // size
        needed = [{h // group for h in range(rank * mine, (rank + 1) * mine)} for rank in range(size)]
        return len({len(n) for n in needed}) == 1 and mine % len(needed[0]) == 0 and _evenly_held(needed)

    assert heads_split(size, heads, kv) == works(size)
    assert sizes_that_split(heads, kv) == ", ".join(str(n) for n in range(1, heads + 1) if works(n))


def _evenly_held(needed: list[set[int]]) -> bool:
    """Whether every kv head is on the same number of ranks."""
    held = [sum(head in each for each in needed) for head in set().union(*needed)]
    return len(set(held)) == 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 3))
def test_ranks_take_all_rows_once(sizes: list[int], batch: int) -> None:
    total = sum(sizes) * batch
    scaled = tuple(size * batch for size in sizes)
    layouts = [TokenLayout(batch, sum(sizes), scaled, rank) for rank in range(len(sizes))]
    x = torch.arange(total)
    assert torch.equal(torch.cat([layout.take(x) for layout in layouts]), x)
    assert [layout.rows for layout in layouts] == list(scaled)
    assert TokenLayout(batch, sum(sizes)).take(x) is x


def test_layouts_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match="do not split 2 x 3 tokens"):
        TokenLayout(2, 3, (3, 4), 0)
    with pytest.raises(ValueError, match="rank 2"):
        TokenLayout(2, 3, (3, 3), 2)
    with pytest.raises(ValueError, match="positions has shape"):
        TokenLayout(2, 3, positions=torch.arange(3))
    with pytest.raises(ValueError, match="must not be negative"):
        TokenLayout(-1, 3)


def test_document_ids_from_lengths() -> None:
    assert document_ids_from_lengths([[2, 1], [0, 3]]).tolist() == [[0, 0, 1], [1, 1, 1]]
    with pytest.raises(ValueError, match="different totals"):
        document_ids_from_lengths([[2], [3]])
