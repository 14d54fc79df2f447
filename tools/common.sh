# Functions of the scripts in this folder.

# bounded SECONDS COMMAND…: runs a command with a time limit, which includes compilation. It hides make's job server
# from the command: Cargo cannot use it, and would print a warning for each crate with examples in its docs.
bounded() {
  env -u MAKEFLAGS -u MFLAGS python tests/package/bounded.py "$@"
}
