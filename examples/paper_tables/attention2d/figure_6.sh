#!/usr/bin/env bash
exec bash "$(dirname "${BASH_SOURCE[0]}")/../table.sh" attention2d figure_6 "$@"
