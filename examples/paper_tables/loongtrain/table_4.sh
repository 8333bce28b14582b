#!/usr/bin/env bash
exec bash "$(dirname "${BASH_SOURCE[0]}")/../table.sh" loongtrain table_4 "$@"
