#!/usr/bin/env bash
exec bash "$(dirname "${BASH_SOURCE[0]}")/../table.sh" mesh_attention figure_9 "$@"
