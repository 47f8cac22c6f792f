"""The target CUDA C++, for recurrent steps in thread-block clusters. Kernels are compiled by NVRTC."""

from __future__ import annotations

from flexsn_codegen.targets.cuda._clusters import Cluster, ClusterKernel, ClusterNeeds, cluster_needs, cluster_source
from flexsn_codegen.targets.cuda._driver import CudaFunction
from flexsn_codegen.targets.cuda._kernel import CudaKernel
from flexsn_codegen.targets.cuda._nvrtc import why_no_nvrtc
from flexsn_codegen.targets.cuda._target import CUDA, Cuda

__all__ = [
    "CUDA",
    "Cluster",
    "ClusterKernel",
    "ClusterNeeds",
    "Cuda",
    "CudaFunction",
    "CudaKernel",
    "cluster_needs",
    "cluster_source",
    "why_no_nvrtc",
]
