"""Predicts step time, memory and scaling of a model on a cluster, with the error on published runs printed beside."""

from warpsmith.distributed.plan.calibration import calibrate, fit_link
from warpsmith.distributed.plan.cluster import Cluster, Timed
from warpsmith.distributed.plan.gpus import GPUS, Gpu
from warpsmith.distributed.plan.layout import Layout
from warpsmith.distributed.plan.model import Model
from warpsmith.distributed.plan.prediction import Prediction, efficiency, predict, scaling

__all__ = [
    "GPUS",
    "Cluster",
    "Gpu",
    "Layout",
    "Model",
    "Prediction",
    "Timed",
    "calibrate",
    "efficiency",
    "fit_link",
    "predict",
    "scaling",
]
