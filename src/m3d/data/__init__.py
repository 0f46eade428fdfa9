"""Labelled image data: ``load_data`` turns a name or a path into a ``Dataset`` of class-sorted images."""

from m3d.data.classes import ClassData, Dataset
from m3d.data.sources import dataset_names, load_data

__all__ = ["ClassData", "Dataset", "dataset_names", "load_data"]
