"""Sources of rows: local files, data sets of the Hugging Face Hub, and rows in memory, indexed or streamed."""

from sftron.data.sources.files import find_files, open_source, open_stream
from sftron.data.sources.hub import HubSplit
from sftron.data.sources.streaming import EndOfStream, StreamedSource
from sftron.data.sources.views import RawRow, RowList, RowSource, split_source

__all__ = [
    "EndOfStream",
    "HubSplit",
    "RawRow",
    "RowList",
    "RowSource",
    "StreamedSource",
    "find_files",
    "open_source",
    "open_stream",
    "split_source",
]
