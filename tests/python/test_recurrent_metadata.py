"""The metadata of programs with recurrent layers. Its version differs from that of other programs."""

from __future__ import annotations

import pytest
import torch

from etkv import metadata
from etkv.config import LayerConfig
from etkv.errors import EtkvError
from etkv.metadata import read_kv_cache_metadata, write_kv_cache_metadata
from etkv.recurrent_layer import RecurrentLayer

CONVOLUTION = RecurrentLayer("convolution", channels=160, width=4)
RECURRENCE = RecurrentLayer("recurrence", k_heads=2, heads=4, k_dim=16, v_dim=24)
OF_CHANNELS = RecurrentLayer("recurrence", k_heads=4, heads=4, k_dim=16, v_dim=16, channel_decay=True)
LAYERS = (CONVOLUTION, RECURRENCE, OF_CHANNELS)


def written(n_layers: int = 1, layers=LAYERS):
    return write_kv_cache_metadata({}, n_layers=n_layers, n_kv_heads=2, head_dim=8, recurrent_layers=layers)


def test_what_is_written_is_read():
    params = read_kv_cache_metadata(written())
    assert params.recurrent_layers == LAYERS
    assert list(params.layers) == [LayerConfig(2, 8, 8)]


def test_the_form():
    facts = written()
    assert facts["kv_cache.schema_version"] == 2
    assert facts["kv_cache.recurrent_layers"].dtype == torch.int32
    assert facts["kv_cache.recurrent_layers"].tolist() == [
        *(1, 160, 4, 0, 0, 0, 0, 0),
        *(2, 0, 0, 2, 4, 16, 24, 0),
        *(2, 0, 0, 4, 4, 16, 16, 1),
    ]


def test_a_model_without_attention():
    params = read_kv_cache_metadata(written(n_layers=0))
    assert (list(params.layers), params.recurrent_layers) == ([], LAYERS)


def test_programs_without_recurrent_layers_are_as_before():
    facts = written(layers=())
    assert facts["kv_cache.schema_version"] == 1
    assert "kv_cache.recurrent_layers" not in facts
    assert read_kv_cache_metadata(facts).recurrent_layers == ()
    with pytest.raises(EtkvError, match="`n_layers` is 0, expected 1 to 65536"):
        written(n_layers=0, layers=())


def test_version_1_has_no_recurrent_layers():
    """A reader of version 1 would ignore recurrent layers, so programs with them must have another version."""
    assert metadata.RECURRENT_SCHEMA_VERSION != metadata.SCHEMA_VERSION
    assert read_kv_cache_metadata({**written(), "kv_cache.schema_version": 1}).recurrent_layers == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 160, 4, 1, 0, 0, 0, 0], "layer 0 of `kv_cache.recurrent_layers`: k_heads is 1, expected 0"),
        ([1, 160, 4, 0], "has 4 integers, expected 8 for each of 1 to 65536 layers"),
        (7, "has 0 integers, expected 8 for each"),
    ],
)
def test_damage_is_refused(value, words):
    """Unit tests of etkv-core test all values that are refused."""
    with pytest.raises(EtkvError, match=words):
        read_kv_cache_metadata({**written(), "kv_cache.recurrent_layers": value})


def test_version_2_without_them_is_refused():
    facts = written()
    del facts["kv_cache.recurrent_layers"]
    with pytest.raises(EtkvError, match=r"does not report `kv_cache\.recurrent_layers`"):
        read_kv_cache_metadata(facts)
