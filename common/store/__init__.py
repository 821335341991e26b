"""The SSD tier: where an expert's bytes are, how they are read, and who reads them."""

from titan.common.store.calibrate import ReadFigures, calibrate_reads
from titan.common.store.expert_store import ExpertStore, ReadCounts
from titan.common.store.files import CacheMode
from titan.common.store.readers import READ_DEADLINE_S, ReaderPool

__all__ = ["READ_DEADLINE_S", "CacheMode", "ExpertStore", "ReadCounts", "ReadFigures", "ReaderPool", "calibrate_reads"]
