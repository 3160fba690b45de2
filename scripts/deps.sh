#!/usr/bin/env bash
# Brings what the other targets need. Go 1.26 is required; for want of gcc or Python something is skipped, and counted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v go >/dev/null; then
	echo "deps: Go is missing; version 1.26 or later is required: https://go.dev/doc/install" >&2
	exit 1
fi
version=$(go env GOVERSION)
case $version in
go1.[0-9] | go1.[0-9].* | go1.1[0-9]* | go1.2[0-5]*)
	echo "deps: this is $version; version 1.26 or later is required: https://go.dev/doc/install" >&2
	exit 1
	;;
esac
echo "deps: $version"

missing=()
if ! command -v gcc >/dev/null; then
	echo "deps: gcc is missing: without it the race detector is skipped"
	missing+=(gcc libc6-dev)
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	echo "deps: Python 3.11 or later is missing: without it the tests that run torch programs (make venv) are skipped"
	missing+=(python3 python3-venv)
fi
if [ ${#missing[@]} -gt 0 ]; then
	install="apt-get install -y --no-install-recommends ${missing[*]}"
	if ! command -v apt-get >/dev/null; then
		echo "deps: install these in this system's way: ${missing[*]}"
	elif [ "$(id -u)" -ne 0 ]; then
		echo "deps: to install it: sudo $install"
	else
		echo "deps: $install"
		apt-get update -q && DEBIAN_FRONTEND=noninteractive $install || echo "deps: that failed; what needs it is skipped"
	fi
fi

go mod download
echo "deps: Go modules are here"
