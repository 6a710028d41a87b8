"""The order of the examples in the gallery: from the first look to the limits."""

from __future__ import annotations

_ORDER = [
    "plot_quick_start.py",
    "plot_what_each_stage_sees.py",
    "plot_counting_heads.py",
    "plot_noise.py",
    "plot_hard_attention.py",
    "plot_ordinary_data_pipeline.py",
    "recover_minilm_heads.py",
    "plot_exponential_wall.py",
    "learn_on_dask_cluster.py",
]


class GalleryOrder:
    """Sort key for sphinx-gallery; examples that are not listed come last, by name."""

    def __init__(self, source_directory: str) -> None:
        self.source_directory = source_directory

    def __call__(self, filename: str) -> tuple[int, str]:
        place = _ORDER.index(filename) if filename in _ORDER else len(_ORDER)
        return place, filename
