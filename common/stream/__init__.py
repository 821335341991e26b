"""Prompts' layers read in large sequential pieces beside the slots: which, whether that pays, and the reading."""

from titan.common.stream.layer_stream import LayerStream

__all__ = ["LayerStream"]
