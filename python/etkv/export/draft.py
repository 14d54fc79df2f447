"""Creates drafts that read hidden states: a feature predictor, followed by a model's last layers.

A model that is tapped below its last layers returns the input of these layers for each token that it has run. For
other tokens the feature predictor predicts this input. The predictor is a linear function of the token's embedding
and of the previous token's hidden states. It is fitted by least squares on texts that the model generates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from etkv.errors import EtkvError
from etkv.export import attention, layers
from etkv.export.forward import kept_rows, token_inputs
from etkv.export.progress import Progress

_TEXTS, _TOKENS, _AT_ONCE = 96, 192, 32
"""Number of texts for fitting the predictor, number of tokens in each text, and number of texts in a batch."""

_FIRST = 4
"""Number of tokens at the start of a text that are not fitted, because the first hidden states are different."""

_RIDGE = 1e-3
"""The ridge term that is added to the squares of the inputs, as a fraction of the squares' mean."""


class FeaturePredictor(torch.nn.Module):
    """Predicts a layer's output for a token, ``[1, T, hidden]``, from its embedding and its parent's hidden states."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.weight.data, self.linear.bias.data = weight, bias

    def forward(self, embedding: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = self.linear(_inputs(embedding, hidden_states))
        return predicted


class DraftForward(torch.nn.Module):
    """The step of a draft: ``forward(input_ids [1, T], cache_position [T], hidden_states [1, T, hidden],
    known [1, T, 1])`` -> logits and hidden states.

    A row of ``hidden_states`` belongs to the token itself where ``known`` is 1, and to the token before it where
    ``known`` is 0. The returned hidden states are the known or predicted input of the layers. Later tokens need this
    input.
    """

    def __init__(self, model: PreTrainedModel, predictor: FeaturePredictor, last_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.predictor = predictor
        self.rows = kept_rows(model, last_logits)

    def inputs(self, length: int) -> dict[str, torch.Tensor]:
        """Return example inputs of ``length`` tokens."""
        hidden = self.model.config.get_text_config().hidden_size
        return {
            **token_inputs(length),
            "hidden_states": torch.zeros((1, length, hidden), dtype=self.model.dtype),
            "known": torch.zeros((1, length, 1), dtype=self.model.dtype),
        }

    def forward(
        self, input_ids: torch.Tensor, cache_position: torch.Tensor, hidden_states: torch.Tensor, known: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = self.predictor(self.model.get_input_embeddings()(input_ids), hidden_states)
        given = predicted + known * (hidden_states - predicted)
        made = attention.run(self.model, cache_position, inputs_embeds=given, **self.rows)
        return made.logits, given


def cut(model: PreTrainedModel, count: int) -> None:
    """Remove all but the last ``count`` layers of ``model``, and number their caches from 0."""
    decoder = model.get_decoder()
    dropped = len(layers.modules(model)) - count
    decoder.layers = torch.nn.ModuleList(list(decoder.layers)[dropped:])
    whole, config = model.config, layers.last(model.config, count)
    for module in model.modules():
        if getattr(module, "config", None) is whole:
            module.config = config
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx -= dropped


def starts(tokenizer: PreTrainedTokenizerBase, first: list[int | None]) -> list[list[int]]:
    """Return beginnings of texts: a first token, and the start of a chat if the tokenizer has a chat template.

    ``first`` are candidates for the first token, best first. Raises :class:`EtkvError` if all of them are None.
    """
    token = next((token for token in first if token is not None), None)
    if token is None:
        raise EtkvError("draft: the model has no BOS, eos or other token that a text could begin with")
    found = [[token]]
    said = "etkv"
    with contextlib.suppress(Exception):  # A template is a program, and may raise anything.
        chat = tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
        found.append(tokenizer(chat[: chat.rindex(said)], add_special_tokens=False)["input_ids"])
    return [start for start in found if start]


def fit(model: PreTrainedModel, tap: int, starts: list[list[int]], progress: Progress) -> FeaturePredictor:
    """Return the fitted predictor of the output of layer ``tap`` of ``model``.

    The texts are divided among ``starts`` in order. Raises :class:`EtkvError` for a family that changes embeddings
    before its first layer.
    """
    _check_embeddings(model)
    hidden = model.config.get_text_config().hidden_size
    squares = torch.zeros(2 * hidden + 1, 2 * hidden + 1, dtype=torch.float64)
    products = torch.zeros(2 * hidden + 1, hidden, dtype=torch.float64)
    with torch.inference_mode(), _own_attention(model), torch.random.fork_rng():
        torch.manual_seed(0)
        for done in range(0, _TEXTS, _AT_ONCE):
            progress.note(f"... {done} of {_TEXTS} texts")
            start = starts[min(done // _AT_ONCE, len(starts) - 1)]
            text, hidden_states = _texts(model, tap, start)
            embeddings = model.get_input_embeddings()(text)
            x = _inputs(embeddings[:, _FIRST:], hidden_states[:, _FIRST - 1 : -1]).flatten(0, 1).double()
            x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
            squares += x.T @ x
            products += x.T @ hidden_states[:, _FIRST:].flatten(0, 1).double()
    squares += _RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=squares.dtype)
    solved = torch.linalg.solve(squares, products).to(model.dtype)
    return FeaturePredictor(solved[:-1].T.contiguous(), solved[-1])


def _inputs(embedding: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the embedding and the hidden states, scaled to the same magnitude and concatenated."""
    size = (embedding.shape[-1],)
    norm = torch.nn.functional.rms_norm
    return torch.cat([norm(embedding, size, eps=1e-6), norm(hidden_states, size, eps=1e-6)], dim=-1)


@contextlib.contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run ``model`` with transformers' eager attention, and without its own generation settings."""
    settings = model.generation_config
    # Other implementations ignore or refuse softcaps and sinks.
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = settings
        model.set_attn_implementation(attention.NAME)


def _texts(model: PreTrainedModel, tap: int, start: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts that the model generates after ``start``, and the outputs of layer ``tap`` for them.

    The texts are ``[texts, tokens]``, the outputs ``[texts, tokens, hidden]``.
    """
    ids = torch.tensor([start]).expand(_AT_ONCE, -1)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or len(start) + _TOKENS
    kept: list[torch.Tensor] = []
    hook = layers.modules(model)[tap].register_forward_hook(
        lambda module, inputs, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        most = max(1, min(_TOKENS, longest - len(start)))
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most)
    finally:
        hook.remove()
    # The last token was generated but has not run.
    return made[:, :-1], torch.cat(kept, dim=1)


def _check_embeddings(model: PreTrainedModel) -> None:
    given = torch.randn(1, 2, model.config.get_text_config().hidden_size, dtype=model.dtype)
    got = []
    hook = layers.modules(model)[0].register_forward_pre_hook(lambda module, inputs: got.append(inputs[0]))
    try:
        with torch.inference_mode(), _own_attention(model):
            model.get_decoder()(inputs_embeds=given, use_cache=False)
    finally:
        hook.remove()
    if not torch.equal(got[0], given):
        raise EtkvError(
            f"draft: cannot fit a draft of model family {model.config.model_type!r}: it changes embeddings before its "
            "first layer"
        )
