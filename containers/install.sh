#!/usr/bin/env bash
# The steps of the images, run as root in Debian 12 or Ubuntu 24.04 by Dockerfile, farsight.def and check_cpu_image.sh:
#
#     install.sh system [PACKAGE …]        what running needs, other Debian packages, and the user `farsight`
#     install.sh farsight SOURCE EXTRAS    a checkout and the extras of its pyproject.toml, in /opt/farsight
#
# The second asks pip for the versions of the checkout's constraints.txt; pip reads its own settings (/etc/pip.conf, PIP_*).
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive

packages() {
    apt-get update
    apt-get install --yes --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/*
}

case ${1:-} in
    system)
        packages ca-certificates python3 tini "${@:2}"
        # Not 1000, which base images give to users of their own.
        useradd --uid 10001 --user-group --create-home --shell /bin/bash farsight
        install --directory --owner farsight --group farsight /work
        ;;
    farsight)
        source=${2:?is missing: name the checkout} extras=${3?is missing: name the extras, or \'\' for none}
        packages python3-venv
        python3 -m venv /opt/farsight
        /opt/farsight/bin/python -m pip install --constraint "$source/constraints.txt" "$source${extras:+[$extras]}"
        # Beside the command `farsight`, so that it is found by its name.
        launch=$(/opt/farsight/bin/python -c 'import farsight; print(farsight.__path__[0])')/launch
        chmod 755 "$launch"/*.sh
        ln --symbolic "$launch/torchrun.sh" /opt/farsight/bin/
        ;;
    *)
        echo "usage: install.sh system|farsight … (see the comments at the top of this file)" >&2
        exit 2
        ;;
esac
