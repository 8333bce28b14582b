#!/usr/bin/env bash
exec bash "$(dirname "${BASH_SOURCE[0]}")/../table.sh" lightseq table_1 "$@"
