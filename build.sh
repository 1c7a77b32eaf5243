#!/usr/bin/env bash
# Every entry of the project. Each one does its own set-up from a fresh machine (python 3.10 to 3.12, g++) and repeats no work that is done.
#
# Settings by environment:
#   FLASHMLA_PYTHON     interpreter to use as it is, instead of .venv (setup.py passes its own)
#   FLASHMLA_BUILD_DIR  objects and generated sources, default .build
#   FLASHMLA_LIB        the library to write, default ms_flashmla/lib/libms_flashmla.so
#   CXX, CXXFLAGS       compiler, and flags appended to ours (-fsanitize=address, ...)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
build_dir=${FLASHMLA_BUILD_DIR:-$root/.build}
lib=${FLASHMLA_LIB:-$root/ms_flashmla/lib/libms_flashmla.so}
cxx=${CXX:-g++}

# The one list of sources: what both libraries hold, then what is the CPU's and the twin's own. A unit isa_<name>.cc holds the kernel for one
# instruction set, and unit_flags gives it that set; no other unit may hold an instruction that an older processor lacks. The twin is a library
# of its own behind the same operators, in the place of the instruction sets: who only runs on a CPU does not build it.
shared_sources=(
  op_proto/op_proto.cc
  op_proto/proto_json.cc
  tiling/machine.cc
  tiling/tiling.cc
  tiling/tiling_cpu.cc
  tiling/cpu_buffers.cc
  tiling/tiling_ascend.cc
  tiling/ascend_attention.cc
  tiling/ascend_projections.cc
  tiling/tiling_report.cc
  tiling/tiling_c_api.cc
  tiling/tune.cc
  tiling/switches.cc
  op_impl/cpu/thread_pool.cc
  op_impl/cpu/huge_pages.cc
  op_impl/cpu/check.cc
  op_impl/cpu/ms_aot.cc
  op_impl/cpu/stored_attrs.cc
  op_impl/cpu/c_api.cc
)
cpu_sources=(
  op_impl/cpu/scratch.cc
  op_impl/cpu/dispatch.cc
  op_impl/cpu/isa_generic.cc
  op_impl/cpu/isa_avx2.cc
  op_impl/cpu/isa_avx512.cc
)
twin_sources=(
  op_impl/ascendc/op_host/make_kernel_data.cc
  op_impl/ascendc/op_host/product_blocks.cc
  op_impl/twin/engine/site.cc
  op_impl/twin/engine/shadow.cc
  op_impl/twin/engine/l2.cc
  op_impl/twin/engine/fiber.cc
  op_impl/twin/engine/engine.cc
  op_impl/twin/engine/scheduler.cc
  op_impl/twin/engine/report.cc
  op_impl/twin/api/sync.cc
  op_impl/twin/api/copies.cc
  op_impl/twin/api/cube.cc
  op_impl/twin/api/vector.cc
  op_impl/twin/twin_kernel_half.cc
  op_impl/twin/twin_kernel_bf16.cc
  op_impl/twin/twin_launch.cc
  op_impl/twin/twin_dispatch.cc
  op_impl/twin/twin_profile.cc
)

# MindSpore's wheel is built with the old C++ ABI, and AotExtra passes std::string across the boundary. Contraction is off so that
# plain C++ gives the same bits at every -march; the kernels ask for FMA where they want it.
common_flags=(-std=c++17 -O3 -fPIC -pthread -fvisibility=hidden -D_GLIBCXX_USE_CXX11_ABI=0 -ffp-contract=off -fno-math-errno
              -Wall -Wextra)

# The kernels' inner loops address rows by base and stride; -fno-ivopts keeps the compiler from giving each row a pointer of its own
# and spilling them. The uninitialized warnings come from g++ 12's own AVX-512 header.
unit_flags() {
  local kernel_flags="-fno-ivopts"
  case $1 in
    */isa_avx512.cc) echo "$kernel_flags -march=skylake-avx512 -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized" ;;
    */isa_avx2.cc) echo "$kernel_flags -mavx2 -mfma -mf16c" ;;
    */isa_generic.cc) echo "$kernel_flags" ;;
    op_impl/twin/twin_kernel_*.cc) echo "-Iop_impl/twin/include -Iop_impl/ascendc/op_kernel -ffile-prefix-map=$root/=" ;;  # faults name files as in the tree
    op_impl/cpu/dispatch.cc) if is_x86; then echo "-DFLASHMLA_HAVE_AVX512 -DFLASHMLA_HAVE_AVX2"; fi ;;
  esac
}

is_x86() { [[ $(uname -m) == x86_64 ]]; }

say() { printf 'build: %s\n' "$*" >&2; }
fail() { printf 'build: error: %s\n' "$*" >&2; exit 1; }

usage() {
  cat <<'TEXT'
usage: bash build.sh ENTRY [arguments]
  setup     create .venv with MindSpore and what the tests need
  lib       build ms_flashmla/lib/libms_flashmla.so
  twin      build libms_flashmla_twin.so beside it, which runs the Ascend kernel on a simulated chip (MS_FLASHMLA_IMPL=twin)
  demo      run an MLA layer against its reference     [--checkpoint DIR [--layer N]] [--model v2-lite | v3-tp8 | seed] [--json]
  test      run the tests                              [pytest arguments]
  bench     time the layer against the machine's roof  [--case REGEX | --full] [--json FILE] [--plot FILE.png] [--threads N]
  wheel     write a wheel into dist/
  ascend    build the operator package for Ascend 950  [--stage-only] [--vendor NAME] [--install DIR]
  sources   print the C++ sources of the library, one a line
TEXT
}

# A python by this name may be a launcher without an interpreter behind it: only running it tells.
usable_python() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' >/dev/null 2>&1; }  # what the pinned packages and MindSpore take

find_python() {
  local name
  for name in python3.11 python3.12 python3.10 python3 python; do
    if usable_python "$name"; then command -v "$name"; return; fi
  done
  fail "no python 3.10 to 3.12 found (tried python3.11, python3.12, python3.10, python3, python)"
}

make_venv() {  # Debian splits ensurepip off into python3-venv: without it the pip of the interpreter itself serves.
  local python=$1
  if "$python" -c 'import ensurepip' >/dev/null 2>&1; then
    "$python" -m venv "$venv"
  elif "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --without-pip "$venv"
    "$python" -m pip --python "$venv/bin/python" install --quiet pip
  else
    fail "$python has neither ensurepip nor pip; install them (Debian: apt-get install python3-venv)"
  fi
}

setup() {  # The stamp holds the list that was installed: nothing is installed twice, a changed list is installed again.
  local stamp=$venv/requirements.installed
  cmp --silent "$root/requirements.txt" "$stamp" && return
  local python
  python=$(find_python)
  say "setting up .venv with $("$python" --version) (downloads MindSpore on the first run)"
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv "$python"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt"
  cp "$root/requirements.txt" "$stamp"
}

build_python() {  # The library only needs some python with yaml: the whole .venv would be 2.8 GB for that.
  local python=${FLASHMLA_PYTHON:-$venv/bin/python}
  if "$python" -c 'import yaml' >/dev/null 2>&1; then echo "$python"; return; fi
  [[ -z ${FLASHMLA_PYTHON:-} ]] || fail "$python cannot import yaml (pip install pyyaml)"
  python=$(find_python)
  if "$python" -c 'import yaml' >/dev/null 2>&1; then echo "$python"; return; fi
  setup
  echo "$venv/bin/python"
}

generate_machines() {
  local out=$build_dir/gen stamp=$build_dir/gen/.stamp input
  for input in "$root"/tiling/gen_machines.py "$root"/tiling/machines/*.yaml; do
    [[ $stamp -nt $input ]] || { stamp=; break; }
  done
  [[ -z $stamp ]] || return 0
  local python
  python=$(build_python)
  mkdir -p "$out"
  say "machine table from tiling/machines/*.yaml"
  "$python" "$root/tiling/gen_machines.py" "$out"
  touch "$out/.stamp"
}

is_current() {  # object, its command: nothing it was made from is newer, and it was made by this very command
  local object=$1 command=$2 dependency
  [[ -f $object && -f ${object%.o}.d && $(cat "${object%.o}.cmd" 2>/dev/null) == "$command" ]] || return 1
  while read -r dependency; do
    [[ -z $dependency ]] || [[ -f $dependency && ! $dependency -nt $object ]] || return 1
  done < <(sed -e 's/^[^:]*://' -e 's/\\$//' "${object%.o}.d" | tr ' ' '\n')
}

compile() {  # The command file comes last: an interrupted compile is done again.
  local object=$1 command=$2
  rm -f "${object%.o}.cmd"
  eval "$command"
  printf '%s\n' "$command" >"${object%.o}.cmd"
}

require_compiler() { command -v "$cxx" >/dev/null || fail "no C++ compiler: $cxx not found (Debian: apt-get install g++; or set CXX)"; }

# Calls from PyNative take a small library against MindSpore's headers, for one interpreter and one MindSpore: it is built where they
# are, and at the first call where they are not here yet (an isolated pip install).
build_pynative() {
  local python=${FLASHMLA_PYTHON:-$venv/bin/python} folder
  folder=$(dirname "$lib")
  [[ $folder == */ms_flashmla/lib ]] || return 0  # a library of its own, as a sanitizer's, goes with no package
  if ! "$python" -c 'import importlib.metadata as m; m.version("mindspore")' >/dev/null 2>&1; then
    say "skipping the library for PyNative calls: MindSpore is not here yet, it is built at the first call"
    return
  fi
  PYTHONPATH=$root "$python" -c 'import sys; from ms_flashmla import pynative; pynative.build(sys.argv[1])' "$folder" >&2 ||
    say "the library for PyNative calls does not build: they will go through ops.Custom, slower"
}

build_lib() {
  build_library "$lib" "$build_dir/link.cmd" "${shared_sources[@]}" "${cpu_sources[@]}"
  build_pynative
}

build_twin() { build_library "${lib%.so}_twin.so" "$build_dir/link_twin.cmd" "${shared_sources[@]}" "${twin_sources[@]}"; }

build_library() {  # the file to write, where its link command is kept, its sources
  local target=$1 link_cmd=$2
  shift 2
  require_compiler
  cd "$root"
  mkdir -p "$build_dir/obj" "$(dirname "$target")"
  if command -v flock >/dev/null; then exec 9>"$build_dir/lock"; flock 9; fi  # two entries at once share the objects
  generate_machines

  local source object command objects=() jobs compiled=0 all=" ${shared_sources[*]} ${cpu_sources[*]} ${twin_sources[*]} "
  for source in op_proto/*.cc tiling/*.cc op_impl/cpu/*.cc op_impl/twin/*.cc op_impl/twin/*/*.cc; do
    [[ $all == *" $source "* ]] || fail "$source is not in the list of sources of build.sh"
  done
  jobs=$(nproc 2>/dev/null || echo 2)
  for source in "$@"; do
    if [[ $source == */isa_avx* ]] && ! is_x86; then say "skipping $source: this machine is $(uname -m), not x86_64"; continue; fi
    object=$build_dir/obj/$(basename "$source" .cc).o
    objects+=("$object")
    command=$(printf '%q ' "$cxx" "${common_flags[@]}" "-I$root" "-I$build_dir/gen")
    command+="$(unit_flags "$source") ${CXXFLAGS:-} -MMD -c $source -o $(printf '%q' "$object")"
    if is_current "$object" "$command"; then continue; fi
    say "compiling $source"
    while (($(jobs -rp | wc -l) >= jobs)); do wait -n || fail "a source does not compile"; done
    compile "$object" "$command" &
    compiled=$((compiled + 1))
  done
  wait
  for object in "${objects[@]}"; do [[ -f ${object%.o}.cmd ]] || fail "a source does not compile"; done

  local link="$(printf '%q ' "$cxx" -shared -pthread "${objects[@]}")${CXXFLAGS:-}"
  if ((compiled == 0)) && [[ -f $target && $(cat "$link_cmd" 2>/dev/null) == "$link $target" ]]; then
    say "$target is up to date"
    return
  fi
  rm -f "$link_cmd"
  # Renamed into place: a process that has the old library mapped keeps it.
  eval "$link -Wl,-z,defs -o $(printf '%q' "$target.new")"
  mv "$target.new" "$target"
  printf '%s\n' "$link $target" >"$link_cmd"
  say "built $target"
}

build_bench() {  # the benchmark's own library: the machine's ceilings, and operators called without MindSpore
  require_compiler
  local out=$build_dir/libbench.so command
  # Contraction is on, unlike in the library: a ceiling counts a multiply-add as one instruction.
  command=$(printf '%q ' "$cxx" -std=c++17 -O3 -fPIC -shared -pthread -fvisibility=hidden -D_GLIBCXX_USE_CXX11_ABI=0 -ffp-contract=fast \
            -Wall -Wextra "$root"/benchmarks/native/*.cc -o "$out")
  mkdir -p "$build_dir"
  if [[ -f $out && $(cat "$out.cmd" 2>/dev/null) == "$command" && -z $(find "$root/benchmarks/native" -newer "$out") ]]; then return; fi
  say "compiling benchmarks/native"
  rm -f "$out.cmd"
  eval "$command"
  printf '%s\n' "$command" >"$out.cmd"
}

run_python() {  # the interpreter of the project, the package of this tree, in the caller's directory
  local python=${FLASHMLA_PYTHON:-}
  if [[ -z $python ]]; then setup; python=$venv/bin/python; fi
  (build_lib)
  PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$@"
}

entry=${1:-}
shift || true
case $entry in
  setup) setup ;;
  lib) build_lib ;;
  twin) build_twin ;;
  demo) run_python -m ms_flashmla demo "$@" ;;
  test) cd "$root"; run_python -m pytest "${@:-tests}" ;;
  bench) build_bench; export FLASHMLA_BENCH_LIB=$build_dir/libbench.so; run_python "$root/benchmarks/bench.py" "$@" ;;
  wheel) setup; cd "$root"; "$venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir dist . ; ls dist/*.whl ;;
  ascend) cd "$root"; generate_machines; exec bash op_impl/ascendc/build_package.sh "$build_dir" "$@" ;;
  sources) printf '%s\n' "${shared_sources[@]}" "${cpu_sources[@]}" ;;
  *) usage >&2; exit 2 ;;
esac
