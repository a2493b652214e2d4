#!/bin/bash
# Installs Triton-Omni into the tree of a Triton server: install.sh PREFIX [FAMILY...]
#
#   PREFIX/backends/omni_*        our backends, beside the server's own `python`
#   PREFIX/omni_models            a model repository with the FAMILYs, their weights fetched into the store
#   and the packages, into the Python that the server's stub runs ($PYTHON, default python3)
#
# In a Triton container PREFIX is /opt/tritonserver, and `tritonserver --model-repository=PREFIX/omni_models` serves.
# TORCH_INDEX: where torch comes from, if it is not there yet. PIP_ARGS: further arguments for pip.
set -euo pipefail

die() {
    echo "install.sh: $*" >&2
    exit 1
}

[ $# -ge 1 ] || die "usage: install.sh PREFIX [FAMILY...]"
prefix=$1
shift
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
read -r -a pip_args <<<"${PIP_ARGS:-}"

[ -x "$prefix/bin/tritonserver" ] || die "$prefix has no bin/tritonserver"
[ -f "$prefix/backends/python/libtriton_python.so" ] || die "$prefix has no python backend: take an image ...-py3"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
    die "$python is $("$python" -V); 3.11 or 3.12 is needed (Triton 24.12 and later have 3.12)"
stub=$prefix/backends/python/triton_python_backend_stub
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ -f "$stub" ] && ! grep -q "libpython$version" "$stub"; then
    die "the server's stub is for another Python than $python ($version)"
fi

if ! "$python" -c 'import torch' 2>/dev/null; then
    "$python" -m pip install --no-deps --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" \
        ${pip_args[@]+"${pip_args[@]}"} torch
fi
"$python" -m pip install ${pip_args[@]+"${pip_args[@]}"} "$source[client,server,build,demo]"

# From another folder, so that what is installed is found, not the checkout.
share=$(cd / && "$python" -c 'from omni_build import paths; print(paths.root())')
for kind in "$share"/backends/omni_*/; do
    target=$prefix/backends/$(basename "$kind")
    rm -rf "$target"
    cp -r "$kind" "$target"
    echo "install.sh: $target"
done
if [ $# -gt 0 ]; then
    (cd / && "$python" -m omni_client.cli build "$@" --repository "$prefix/omni_models")
fi
echo "install.sh: done; triton-omni serve hibari, or tritonserver --model-repository=$prefix/omni_models"
