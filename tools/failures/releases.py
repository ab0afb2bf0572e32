"""The releases that the index runs, with the versions of the packages that it installs for each."""

from __future__ import annotations

from dataclasses import dataclass

_BESIDE = ("safetensors==0.8.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2")
_OLD = ("tokenizers==0.22.2", "huggingface-hub==1.33.0")
_HUBS = {  # the newest tokenizers and huggingface-hub that each transformers admits
    "5.0.0": (*_OLD, "typer-slim==0.24.0"),
    "5.9.0": _OLD,
    "5.10.0": _OLD,
    "5.23.0": ("tokenizers==0.23.3", "huggingface-hub==2.4.0"),
}


def _pins(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _transformers(version: str) -> tuple[str, ...]:
    hub = _HUBS.get(version, ("tokenizers==0.23.3", "huggingface-hub==1.33.0"))
    return (f"transformers=={version}", *hub, *_BESIDE)


@dataclass(frozen=True)
class Release:
    """One environment.

    Attributes:
        library: The name that the page has for it.
        module: The module of this folder with its configurations.
        version: Its version, by which the releases of a library are in order.
        beside: The versions of the libraries that decide about the results, as the page prints them.
        pins: Everything that is installed; torch and all other packages are those of the environment of the tool.
        empty: The modules that the library imports and never calls here, for which an empty one stands.
        for_newer_python: Pins whose metadata wants Python 3.12, and whose code runs with an older one all the same.
    """

    library: str
    module: str
    version: str
    beside: str
    pins: tuple[str, ...]
    empty: tuple[str, ...] = ()
    for_newer_python: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.library}-{self.version}".lower().replace(" ", "-")


def _trl(version: str, transformers: str) -> Release:
    pins = (f"trl=={version}", *_transformers(transformers))
    return Release("TRL", "of_trl", version, f"transformers {transformers}", pins)


_AXOLOTL = _pins(
    "axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 safetensors==0.8.0 fsspec==2025.10.0 addict==2.4.0 "
    "einops==0.8.2 evaluate==0.4.1 fire==0.7.1 humanfriendly==10.0 coloredlogs==15.0.1 langdetect==1.0.9 "
    "optimum==1.16.2 posthog==6.7.11 backoff==2.2.1 schedulefree==1.4.1 scikit-learn==1.9.1 scipy==1.17.1 "
    "joblib==1.6.0 threadpoolctl==3.8.0 sentencepiece==0.2.3 termcolor==3.3.0 python-dotenv==1.0.1 responses==0.18.0 "
    "pydantic-extra-types==2.11.1 pycountry==26.2.16 six==1.17.0 narwhals==2.29.0 numba==0.68.1 llvmlite==0.50.0 "
    "fastcore==2.2.41"
)
_LLAMA_FACTORY = _pins(
    "llamafactory==0.9.5 transformers==5.6.0 trl==0.24.0 peft==0.18.1 accelerate==1.11.0 datasets==4.0.0 "
    "tokenizers==0.22.2 huggingface-hub==1.33.0 safetensors==0.8.0 dill==0.3.8 multiprocess==0.70.16 fsspec==2025.3.0 "
    "einops==0.8.2 fire==0.7.1 termcolor==3.3.0 omegaconf==2.4.0 tyro==0.8.14 shtab==1.13.0 docstring-parser==0.18.0 "
    "av==16.0.0 sentencepiece==0.2.3 pandas==2.3.3 pytz==2026.6 hf-transfer==0.1.9 sse-starlette==3.7.0 "
    "pydub==0.25.1"
)
_SWIFT = _pins(
    "ms-swift==4.6.0 transformers==5.19.0 trl==0.29.1 peft==0.20.0 accelerate==1.15.0 datasets==4.8.4 "
    "tokenizers==0.23.3 huggingface-hub==1.33.0 safetensors==0.8.0 fsspec==2026.2.0 addict==2.4.0 attrdict==2.0.1 "
    "binpacking==2.0.1 cpm-kernels==1.0.11 dacite==1.9.2 einops==0.8.2 json-repair==0.64.6 modelscope==1.40.2 "
    "modelscope-hub==0.5.1 nltk==3.10.4 openai==3.57.0 jiter==0.19.0 oss2==2.19.1 rouge==1.0.1 sentencepiece==0.2.3 "
    "transformers-stream-generator==0.0.5 simplejson==4.3.0 joblib==1.6.0 cloudpickle==3.1.3"
)


RELEASES = (
    _trl("1.9.0", "5.16.1"),
    _trl("1.11.0", "5.18.0"),
    _trl("1.13.0", "5.19.0"),
    _trl("1.14.1", "5.20.1"),
    _trl("1.16.0", "5.23.0"),
    *(
        Release("transformers", "of_transformers", version, "peft 0.21.2", _transformers(version))
        for version in ("5.0.0", "5.9.0", "5.10.0", "5.16.1", "5.23.0")
    ),
    Release(
        "axolotl", "of_axolotl", "0.19.0", "transformers 5.16.1, TRL 1.9.0",
        _AXOLOTL + _pins(
            "axolotl==0.19.0 transformers==5.16.1 trl==1.9.0 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 "
            "tokenizers==0.23.1 huggingface-hub==1.17.0 kernels==0.16.2 kernels-data==0.16.2 mistral-common==1.11.5 "
            "tomlkit==0.13.3 liger-kernel==0.8.1 pydantic==2.12.5 pydantic-core==2.41.5 pillow==11.3.0"
        ),
    ),
    Release(
        "axolotl", "of_axolotl", "0.21.0", "transformers 5.20.1, TRL 1.14.1",
        _AXOLOTL + _pins(
            "transformers==5.20.1 trl==1.14.1 peft==0.21.2 accelerate==1.15.0 datasets==5.0.1 "
            "tokenizers==0.23.3 huggingface-hub==1.33.0 kernels==0.17.2 mistral-common==1.12.0 tomlkit==0.14.0 "
            "liger-kernel==0.8.4 pydantic==2.13.5 pydantic-core==2.46.5 pydantic-settings==2.15.0 pillow==12.3.0"
        ),
        for_newer_python=("axolotl==0.21.0",),
    ),
    Release(
        "LLaMA-Factory", "of_llamafactory", "0.9.5", "transformers 5.6.0, peft 0.18.1", _LLAMA_FACTORY,
        empty=("torchaudio",),
    ),
    Release("ms-swift", "of_swift", "4.6.0", "transformers 5.19.0, TRL 0.29.1", _SWIFT),
)  # fmt: skip

OLD = Release(
    "TRL", "of_trl", "0.29.0", "transformers 4.57.6, NumPy 1.26.4",
    _pins(
        "trl==0.29.0 transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2 safetensors==0.8.0 "
        "accelerate==1.15.0 datasets==4.4.2 peft==0.21.2 numpy==1.26.4 pyarrow==21.0.0 pandas==3.0.6 fsspec==2025.10.0 "
        "dill==0.4.0 multiprocess==0.70.18 httpx==0.28.1 httpcore==1.0.9 anyio==4.16.0"
    ),
)  # fmt: skip
"""The older half of a comparison, whose rows of verify_trainer are not run."""
COMPARED = (("trl-1.9.0", "trl-1.16.0"), ("trl-0.29.0", "trl-1.16.0"), ("transformers-5.0.0", "transformers-5.23.0"))
"""The pairs of releases whose configurations are recorded and compared, by their names."""

NOT_RUN = {
    "unsloth 2026.10": "imports only where it finds a GPU",
    "verl 0.9.1": "its trainers are no `transformers.Trainer`, and need a GPU",
    "prime-rl": "its trainer is no `transformers.Trainer`, and needs a GPU",
}
"""The libraries that are not run, with the reason."""

CONFIGURATIONS = {
    "default": "messages, the library's defaults",
    "answers": "messages, a loss over all answers of a conversation",
    "named_template": "messages, the library's own template",
    "jinja": "messages, the tokenizer's template by another backend",
    "prompt_completion": "prompt and completion",
    "whole_texts": "whole texts, a loss over everything",
    "packing": "packing",
    "packing_neat": "packing, conversations kept apart by an option",
    "packing_split": "packing, long conversations are split",
    "packing_wrapped": "packing, a stream that is cut",
    "padding_free": "padding-free",
    "thoughts": "thoughts in the answers",
    "tool_calls": "tool calls",
    "control_text": "a text spells control tokens",
    "sanitized": "a text spells control tokens, the library's own remedy",
    "truncation": "a limit shorter than some conversations",
    "dropped": "a limit that drops conversations",
    "accumulation": "accumulation of micro-batches with unequal numbers of labels",
    "lora": "LoRA",
    "resume": "a resumed run",
    "evaluation": "an evaluation",
}
"""What each configuration is about, in the order of the page."""
