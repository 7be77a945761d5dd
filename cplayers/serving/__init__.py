"""Requests on the degree of context parallelism that suits them, moved where they outgrow it."""

from cplayers.serving.config import ServingConfig
from cplayers.serving.fleet import Fleet
from cplayers.serving.handover import Passage, hand_over
from cplayers.serving.requests import Progress, Replicas, Request
from cplayers.serving.scheduler import Scheduler
from cplayers.serving.served import ServedModel
from cplayers.serving.server import Server
from cplayers.serving.trace import read_trace, write_trace

__all__ = [
    "Fleet",
    "Passage",
    "Progress",
    "Replicas",
    "Request",
    "Scheduler",
    "ServedModel",
    "Server",
    "ServingConfig",
    "hand_over",
    "read_trace",
    "write_trace",
]
