#!/usr/bin/env bash
# Runs the steps of Dockerfile's CPU target in a folder with a bare Debian 12 in place of a container, then check.sh in it:
#
#     debootstrap --variant=minbase bookworm ROOT
#     containers/check_cpu_image.sh ROOT [EXTRAS]
#
# For root, on Linux. It installs what is committed, with Dockerfile's extras unless others are named ('' for none). pip
# sees ROOT/etc/pip.conf and this shell's PIP_* variables.
set -euo pipefail

root=$(realpath "${1:?is missing: name a folder with a bare Debian}")
checkout=$(cd "$(dirname "$0")/.." && pwd)
extras=${2-$(sed -n 's/^ARG EXTRAS=//p' "$checkout/containers/Dockerfile")}
if [[ $root == / || ! -x $root/usr/bin/apt-get ]]; then
    echo "$root has no bare Debian: make one with debootstrap --variant=minbase bookworm $root" >&2
    exit 2
fi
if [[ -z ${ALONE:-} ]]; then # with mounts and processes of its own, which end with it
    ALONE=yes exec unshare --mount --propagation private --pid --fork --kill-child "$0" "$root" "$extras"
fi

PS4='$ '
set -x
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
echo "127.0.0.1 localhost $(hostname)" > "$root/etc/hosts" # as engines do

mkdir "$root/src"
git -C "$checkout" archive HEAD | tar --extract --directory "$root/src"
chroot "$root" /src/containers/install.sh system
chroot "$root" /src/containers/install.sh farsight /src "$extras"
cp "$root/src/containers/check.sh" "$root/check.sh"
rm -r "$root/src" # the image's last stage does not have it either

path=/opt/farsight/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
env --ignore-environment PATH="$path" HOME=/home/farsight \
    chroot --userspec farsight:farsight "$root" bash -c 'cd /work && /check.sh'
