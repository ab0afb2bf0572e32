"""Loading of the weights of a Hugging Face folder, with a check of every key (laws 9 and 10)."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sftron.checkpoint.frozen_files import NF4_FILE, FrozenFiles, Stamp, make_nf4_file, places_in, require_stamps
from sftron.checkpoint.model_folder import EMBEDDINGS, HEAD, INDEX, read_config, read_json, require_inside
from sftron.checkpoint.shards import DTYPES
from sftron.models.adapters import AdapterStart, add_adapters, initial_value, is_adapter, peft_name
from sftron.models.architecture import LlamaConfig
from sftron.models.fusion import expected_shapes, read_fused, source_names
from sftron.models.llama import LlamaForSFT
from sftron.models.mixtures import spelling_of
from sftron.models.mxfp4 import PackedWeight, names_of_parts, packed_weights
from sftron.models.quantization import NF4, from_stored, store_frozen_in, to_stored
from sftron.models.sharding import local_shard
from sftron.models.weight_stream import WeightStream
from sftron.models.wrappers import text_names, wrong_constants

_PER_TOKEN = (EMBEDDINGS, HEAD, "lm_head.bias", "model.embed_tokens_per_layer.weight")
"""The tensors with one row per token."""

_ROWS_AT_A_TIME = 4096
"""34 MB for rows of 4096 numbers in bf16; a whole matrix of 128,256 rows takes 1 GB."""

_MAX_NAMED = 20

_DERIVED = ".rotary_emb.inv_freq"
"""The suffix of the inverse frequencies in Llama 2's files, which follow from the config and are skipped."""

# --- The files of weights ---


class SafetensorsFolder:
    """The tensors in a folder's model.safetensors, or in the files listed by its index, read lazily in a `with` block.

    For a multimodal model, these are the tensors of its text model, under a text model's names; see `carried`.
    Weights in MXFP4 are read as bf16; see mxfp4.py.

    Args:
        file_name: The only file to read; by default, all files of a model.

    Raises:
        ValueError: On entering, the tensors in the files differ from those in the index: a tensor is in two files, in
            another file than the index states, in no file, or not in the index. The message lists all of them. Or a
            weight in MXFP4 has a wrong shape.
    """

    def __init__(self, folder: Path, file_name: str | None = None) -> None:
        self.folder, self._file_name = folder, file_name
        self._files: dict[str, Any] = {}
        self.stored_names: dict[str, str] = {}
        """The name in the files of each tensor of the text model."""
        self._packed: dict[str, PackedWeight] = {}
        self._carried: list[str] = []
        self.path_of: dict[str, Path] = {}
        """The file of each tensor, by its name in the files."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        name = self._file_name
        paths, weight_map = ([self.folder / name], None) if name else _weight_files(self.folder)
        files_of: dict[str, list[str]] = {}
        with ExitStack() as stack:
            for path in paths:
                require_inside(self.folder, path)
                try:
                    file = stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ValueError(
                        f"{path}: not a readable safetensors file: {error}; download or convert it again"
                    ) from error
                names = file.keys()
                self._files.update(dict.fromkeys(names, file))
                self.path_of.update(dict.fromkeys(names, path))
                for name in names:
                    files_of.setdefault(name, []).append(path.name)
            if weight_map is not None:
                _require_as_stated(self.folder, files_of, weight_map)
            has_config = self._file_name is None and (self.folder / "config.json").exists()
            config = read_json(self.folder / "config.json") if has_config else {}
            try:
                self.stored_names, self._carried = text_names(self._files, config)
                self._packed = packed_weights(config, self.stored_names, self._slice)
            except ValueError as error:
                raise ValueError(f"{self.folder}: {error}") from error
            for name in self._packed:
                self.stored_names[name] = name
                for part in names_of_parts(name):
                    del self.stored_names[part]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        """Returns the names of all tensors except those that follow from the config."""
        return sorted(name for name in self.stored_names if not name.endswith(_DERIVED))

    def metadata(self) -> dict[str, str]:
        """Returns the metadata of all files."""
        return {key: value for file in set(self._files.values()) for key, value in (file.metadata() or {}).items()}

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Returns the name of the type in the file, such as BF16."""
        return self._slice(name).get_dtype()

    def read_rows(self, name: str, rows: Collection[int]) -> Tensor:
        """Returns some rows of a matrix, [len(rows), ...], without reading the others."""
        stored = self._slice(name)
        return torch.cat([stored[row : row + 1] for row in rows])

    def read(self, name: str) -> Tensor:
        """Returns a copy of the tensor in its stored type."""
        if name in self._packed:
            return self._packed[name][:]
        stored = self.stored_names[name]
        return self._files[stored].get_tensor(stored)

    def read_range(self, name: str, start: int, end: int) -> Tensor:
        """Returns rows [start, end) without reading the others."""
        return self._slice(name)[start:end]

    @property
    def has_packed(self) -> bool:
        """Whether weights are stored in MXFP4."""
        return bool(self._packed)

    def carried(self) -> dict[str, Callable[[], Tensor]]:
        """Returns functions that read the tensors that do not belong to the text model, by their names in the files.
        They open the files again and keep them open, so they work after the `with` block, and after the files are
        deleted."""
        paths = {self.path_of[name] for name in self._carried}
        files = {path: safe_open(path, framework="pt") for path in paths}
        return {name: partial(files[self.path_of[name]].get_tensor, name) for name in sorted(self._carried)}

    def _slice(self, name: str) -> Any:
        if name in self._packed:
            return self._packed[name]
        stored = self.stored_names[name]
        return self._files[stored].get_slice(stored)


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Returns the weight files and, if there is an index, the name of the file that contains each tensor."""
    index_path = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"], None
    if not index_path.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise ValueError(
                f"{folder}: holds no safetensors, only {pickles[0]}, a pickle, which runs code when loaded. "
                "Convert it once with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
            )
        raise ValueError(f"{folder}: holds neither model.safetensors nor {INDEX}.")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: has no weight_map.")
    weight_map = {tensor: str(name) for tensor, name in weight_map.items()}
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index_path}: names files outside its folder: {', '.join(outside)}.")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder}: files of {INDEX} are missing: {', '.join(missing)}. Download them again.")
    return [folder / name for name in names], weight_map


def _require_as_stated(folder: Path, files_of: dict[str, list[str]], weight_map: dict[str, str]) -> None:
    different = [
        f"{name}: in {' and '.join(files_of.get(name, ['no file']))}, the index says {weight_map.get(name, 'none')}"
        for name in sorted(files_of.keys() | weight_map.keys())
        if files_of.get(name) != [weight_map.get(name)] and not name.endswith(_DERIVED)
    ]
    if different:
        raise ValueError(
            f"{folder}: {INDEX} does not match the files that it lists:{listed(different)}\n"
            "Download all files of the model again, from one revision."
        )


def listed(problems: Sequence[str]) -> str:
    """Returns the first problems, each on an indented line, and the number of the others."""
    rest = [f"... and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []
    return "".join(f"\n  {line}" for line in [*problems[:_MAX_NAMED], *rest])


def file_digests(folder: Path, rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
    """Returns the SHA-256 of each weight file that this rank reads, by name."""
    digests = {}
    for path in _weight_files(folder)[0][rank::num_ranks]:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def file_stamps(folder: Path) -> dict[Path, Stamp]:
    """Returns the stamp of each weight file. Raises OSError."""
    return {path: Stamp.of(path) for path in _weight_files(folder)[0]}


def digest_of(file_digests: Mapping[str, str]) -> str:
    """Returns the hash of a model's weights, given the digests of all its files."""
    return hashlib.sha256(repr(sorted(file_digests.items())).encode()).hexdigest()


# --- The model ---


class StreamedBase(NamedTuple):
    """How the frozen matrices of a model are streamed."""

    folder: Path
    """The folder for those in NF4, which are stored there once."""
    digest: str
    """The digest of the base model."""
    stamps: Mapping[Path, Stamp] = {}
    """Those of its files before they were read for the digest."""
    is_main: bool = True
    """Whether this rank writes them."""
    together: Callable[[Callable[[], dict[Path, Stamp]]], dict[Path, Stamp]] = lambda make: make()
    """Calls a function on every rank, and raises what any of them raises on all."""


def load_model(
    folder: str | Path,
    attention: str | Sequence[str] = "sdpa",
    compute_dtype: torch.dtype = torch.bfloat16,
    num_positions: int | None = None,
    activation_checkpointing: str = "none",
    *,
    architecture: LlamaConfig | None = None,
    vocab_size: int | None = None,
    initialize_ids: Collection[int] = (),
    device: torch.device | str = "cpu",
    shard: Callable[[LlamaForSFT], None] | None = None,
    adapters: AdapterStart | None = None,
    frozen_dtype: torch.dtype = torch.float32,
    stream: StreamedBase | None = None,
) -> LlamaForSFT:
    """Returns the model in `folder` with fp32 master weights; LlamaForSFT describes the arguments before
    `architecture`.

    fp16 and bf16 weights are cast to fp32, which is exact. At most one tensor is held in addition to the model.

    Args:
        architecture: The architecture in the folder's config.json, if that was read already.
        vocab_size: The number of rows of embeddings and head if tokens were added; by default the same as in the
            folder.
        initialize_ids: The tokens whose rows are initialized to the mean of all other rows. They must include all
            tokens beyond the folder's vocabulary.
        shard: A function that shards the parameters while they are on the meta device. Each rank then reads only its
            own rows.
        adapters: Adapters to add; everything else but their modules_to_save is then frozen.
        frozen_dtype: The type of frozen matrices; with NF4, those outside the blocks are in compute_dtype. Norms and
            biases are fp32.
        stream: With adapters, leaves frozen matrices in the files, from which `model.stream` fetches them.

    Raises:
        ValueError: A key is missing or unexpected, or has a wrong shape or an unsupported type. The message lists all
            such keys, and no weights have been read. Or the model does not support the adapters.
    """
    folder = Path(folder)
    stored = read_config(folder) if architecture is None else architecture
    config = stored if vocab_size is None else replace(stored, vocab_size=vocab_size)
    with torch.device("meta"):
        model = LlamaForSFT(config, attention, compute_dtype, num_positions, activation_checkpointing)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name in {*_PER_TOKEN} & shapes.keys():
        shapes[name] = torch.Size([stored.vocab_size, *shapes[name][1:]])
    with SafetensorsFolder(folder) as source:
        spelling = spelling_of(source.names())
        check_keys(source, expected_shapes(shapes.items(), stored, spelling), stored)
        if adapters is not None:
            add_adapters(model, config, adapters.spec)
            store_frozen_in(model, frozen_dtype, compute_dtype)
        if stream is not None:
            model.stream = WeightStream(model)
            model.stream.release()
        if shard is not None:
            shard(model)
        model.to_empty(device=device)
        if model.stream and stream:
            files = _frozen_files(source, model.stream.stored_as, stored, spelling, stream)
            model.stream.open(model, files, torch.device(device), mode=activation_checkpointing)
        streamed = model.stream.names if model.stream else ()
        for name, parameter in model.named_parameters():
            if name in streamed:
                continue
            rows, (first, *rest) = local_shard(parameter.detach())
            # A tensor may also be sharded along another dimension; then this rank keeps only a part of each row.
            columns = tuple(slice(start, start + length) for start, length in zip(rest, rows.shape[1:], strict=True))
            if adapters is not None and (peft_name(name) in adapters.tensors or is_adapter(name)):
                value = _adapter_value(source, name, parameter.shape, adapters, frozen_dtype)
                rows.copy_(value[(slice(first, first + len(rows)), *columns)])
                continue
            num_stored = min(max(shapes[name][0] - first, 0), len(rows))
            if num_stored:
                whole, last = shapes[name][0], first + num_stored
                weight = read_fused(name, whole, stored, source.read_range, first, last, spelling)
                if rows.dtype == NF4:  # its rows are always whole
                    rows[:num_stored] = to_stored(weight.to(rows.device), NF4)
                else:
                    rows[:num_stored] = weight[(slice(None), *columns)]
            if name in _PER_TOKEN:
                new = [token_id - first for token_id in initialize_ids if first <= token_id < first + len(rows)]
                if new:
                    rows[new] = _mean_row(source, name, initialize_ids)[columns].to(rows)
    return model


def _frozen_files(
    source: SafetensorsFolder,
    matrices: Mapping[str, tuple[torch.Size, torch.dtype]],
    config: LlamaConfig,
    spelling: str,
    stream: StreamedBase,
) -> FrozenFiles:
    """Returns the files of the streamed matrices, given the shape and the type in which each is stored."""
    if source.has_packed:
        raise ValueError(
            f"model.frozen_base: stream is not implemented for weights in MXFP4, which {source.folder} has; set it to "
            "resident, or save the model in bfloat16 first"
        )
    stored = {path: places_in(path) for path in set(source.path_of.values())}
    of_base = {name: stored[source.path_of[at]][at] for name, at in source.stored_names.items()}
    sources = {name: source_names(name, config, spelling) for name in matrices}
    parts = {name: [of_base[each] for each in names] for name, names in sources.items()}
    in_nf4 = {name: shape for name, (shape, dtype) in matrices.items() if dtype == NF4}

    def quantized(name: str) -> Tensor:
        whole = in_nf4[name][0]
        stored = to_stored(read_fused(name, whole, config, source.read_range, 0, whole, spelling), NF4)
        require_stamps(stream.stamps)
        return stored

    stamps = dict(stream.stamps)
    if in_nf4:
        make = partial(make_nf4_file, stream.folder, stream.digest, in_nf4, quantized)
        stamps |= stream.together(make if stream.is_main else dict)
        parts |= {name: [place] for name, place in places_in(stream.folder / NF4_FILE).items()}
    files = FrozenFiles(parts)
    require_stamps(stamps)  # now that the files are open, with stamps of their own
    return files


def _adapter_value(
    source: SafetensorsFolder, name: str, shape: torch.Size, adapters: AdapterStart, frozen_dtype: torch.dtype
) -> Tensor:
    """Returns the whole value of a trained parameter that is not taken from the base model."""
    given = adapters.tensors.get(peft_name(name))
    if given is None:
        norms = partial(_row_norms, source, frozen_dtype)
        return initial_value(name, shape, seed=adapters.seed, init=adapters.init, row_norms=norms)
    if given.shape != shape:
        raise ValueError(f"the adapter's {peft_name(name)} has {list(given.shape)}, but the model has {list(shape)}")
    return given


def _row_norms(source: SafetensorsFolder, frozen_dtype: torch.dtype, projection: str) -> Tensor:
    """Returns the norms of a projection's rows as stored, fp32."""
    return from_stored(to_stored(source.read(f"{projection}.weight"), frozen_dtype), torch.float32).norm(dim=1)


def _mean_row(source: SafetensorsFolder, name: str, without: Collection[int]) -> Tensor:
    """Returns the mean of the rows of all known tokens, fp32 [H]. A token with this embedding is initially neither
    likely nor unlikely to be generated (Hewitt, Initializing New Word Embeddings, 2021)."""
    num_rows, *shape = source.shape(name)
    is_known = torch.ones(num_rows, dtype=torch.bool)
    is_known[[token_id for token_id in without if token_id < num_rows]] = False
    total = torch.zeros(shape, dtype=torch.float64)
    for first, rows in _in_parts(source, name):
        total += rows[is_known[first : first + len(rows)]].sum(dim=0, dtype=torch.float64)
    return (total / is_known.sum()).float()


def _in_parts(source: SafetensorsFolder, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yields all rows of a matrix in chunks, each with the index of its first row."""
    num_rows = source.shape(name)[0]
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        yield first, source.read_range(name, first, min(first + _ROWS_AT_A_TIME, num_rows))


def wrong_tensors(found: Mapping[str, tuple[torch.Size, str]], expected: Mapping[str, torch.Size]) -> list[str]:
    """Returns the problems of tensors with these shapes and types in a file, sorted by name."""
    problems = [f"{name}: missing, expected {list(expected[name])}" for name in expected.keys() - found.keys()]
    problems += [f"{name}: unexpected, has {list(found[name][0])}" for name in found.keys() - expected.keys()]
    for name in found.keys() & expected.keys():
        shape, dtype = found[name]
        if shape != expected[name]:
            problems.append(f"{name}: has {list(shape)}, expected {list(expected[name])}")
        if dtype not in DTYPES:
            problems.append(f"{name}: stored as {dtype}; sftron supports only {', '.join(DTYPES)}")
    return sorted(problems)


def check_keys(source: SafetensorsFolder, expected: dict[str, torch.Size], config: LlamaConfig) -> None:
    """Raises ValueError if a folder's tensors do not match `expected_shapes`, or if a stored tied head differs from the
    embeddings."""
    found = {name: (source.shape(name), source.dtype(name)) for name in source.names()}
    stores_tied_head = config.tie_word_embeddings and HEAD in found
    if stores_tied_head:
        expected = expected | {HEAD: expected[EMBEDDINGS]}
    if problems := wrong_tensors(found, expected) + wrong_constants(source.carried(), config.model_type):
        raise ValueError(
            f"{source.folder}: the weights do not match config.json:\n  "
            + "\n  ".join(problems)
            + "\nCheck that the download is complete and that config.json belongs to it."
        )
    if stores_tied_head and not all(
        rows.equal(source.read_range(EMBEDDINGS, first, first + len(rows))) for first, rows in _in_parts(source, HEAD)
    ):
        raise ValueError(
            f"{source.folder}: config.json ties the head to the embeddings (tie_word_embeddings: true), but {HEAD} and "
            f"{EMBEDDINGS} differ. Set tie_word_embeddings to false if the head was trained apart; else remove it."
        )
