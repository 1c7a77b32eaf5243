#!/usr/bin/env bash
# Stages flat op_host and op_kernel folders, as CANN's compilers take them, and builds the custom operator package for ascend950 from them.
#   build_package.sh BUILD_DIR [--stage-only] [--vendor NAME] [--install DIR]
# BUILD_DIR/gen holds the generated machine table.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build_dir=$(cd "$1" && pwd)
shift
vendor=ms_flashmla install='' stage_only=''
while (($#)); do
  case $1 in
    --stage-only) stage_only=1; shift ;;
    --vendor) vendor=$2; shift 2 ;;
    --install) install=$2; shift 2 ;;
    *) printf 'ascend: unknown option %s (--stage-only, --vendor NAME, --install DIR)\n' "$1" >&2; exit 2 ;;
  esac
done

say() { printf 'ascend: %s\n' "$*" >&2; }

kernel_sources=(op_impl/ascendc/op_kernel/*.h op_impl/ascendc/op_kernel/*.cpp op_proto/op_list.h op_proto/op_types.h tiling/tiling_data.h)
host_sources=(op_impl/ascendc/op_host/*.h op_impl/ascendc/op_host/*.cpp op_impl/ascendc/op_host/*.cc op_impl/ascendc/op_kernel/kernel_data.h
              op_proto/op_list.h op_proto/op_types.h tiling/*.h tiling/machine.cc tiling/tiling.cc tiling/tiling_cpu.cc tiling/cpu_buffers.cc tiling/tiling_ascend.cc
              tiling/ascend_attention.cc tiling/ascend_projections.cc)

# One flat folder: paths in our own includes go, CANN's (tiling/platform/...) stay; .cc becomes .cpp.
stage() {
  local folder=$1 file name script=''
  shift
  mkdir -p "$folder"
  for file in "$@"; do script+="s|\"$file\"|\"$(basename "$file")\"|;"; done
  for file in "$@"; do
    name=$(basename "$file")
    [[ $name == *.cc ]] && name=${name%.cc}.cpp
    [[ ! -e $folder/$name ]] || { say "two sources are called $name"; exit 1; }
    sed -e "$script" "$file" >"$folder/$name"
  done
}

cd "$root"
project=$build_dir/ascend
rm -rf "$project"
stage "$project/op_kernel" "${kernel_sources[@]}"
stage "$project/op_host" "${host_sources[@]}"
cp "$build_dir"/gen/*.inc "$project/op_host/"
say "staged $project/op_host and $project/op_kernel"
if [[ -n $stage_only ]]; then exit 0; fi

# What the build needs, each with what to do about it.
missing=()
cann=${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-}}
if [[ -z $cann ]]; then
  missing+=("CANN 9: neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set (source <CANN>/set_env.sh)")
elif [[ ! -d $cann ]]; then
  missing+=("CANN 9: $cann is not a folder (source <CANN>/set_env.sh)")
else
  [[ -d $cann/tools/op_project_templates/ascendc/customize ]] || missing+=("CANN's project template: $cann/tools/op_project_templates/ascendc/customize (install the toolkit package)")
  command -v bisheng >/dev/null || [[ -x $cann/bin/bisheng || -x $cann/compiler/ccec_compiler/bin/bisheng ]] || missing+=("the compiler bisheng (part of the toolkit package)")
fi
command -v cmake >/dev/null || missing+=("cmake (Debian: apt-get install cmake)")
if ((${#missing[@]})); then
  say "the package for ascend950 cannot be built here. Missing:"
  printf '  - %s\n' "${missing[@]}" >&2
  exit 1
fi

# The template's own folders, with ours in the place of its sample operator.
work=$build_dir/ascend_project
rm -rf "$work"
cp -r "$cann/tools/op_project_templates/ascendc/customize" "$work"
if [[ -d $cann/tools/op_project_templates/ascendc/common ]]; then cp -rn "$cann/tools/op_project_templates/ascendc/common/." "$work/cmake/util/"; fi
rm -f "$work"/op_host/*.cpp "$work"/op_host/*.h "$work"/op_kernel/*.cpp "$work"/op_kernel/*.h
cp "$project"/op_host/* "$work/op_host/"
cp "$project"/op_kernel/* "$work/op_kernel/"
# The kernel sets every event itself, and hands P from UB to L1 over the hardware path.
{ printf 'add_ops_compile_options(ALL OPTIONS -DENABLE_CV_COMM_VIA_SSBUF=true --cce-auto-sync=off)\n'; cat "$work/op_kernel/CMakeLists.txt"; } >"$work/op_kernel/CMakeLists.new"
mv "$work/op_kernel/CMakeLists.new" "$work/op_kernel/CMakeLists.txt"
cmake -S "$work" -B "$work/build_out" -DCMAKE_CXX_STANDARD=17 -DASCEND_COMPUTE_UNIT=ascend950 -DASCEND_CANN_PACKAGE_PATH="$cann" -Dvendor_name="$vendor" \
      -DENABLE_SOURCE_PACKAGE=True -DENABLE_BINARY_PACKAGE=True -DCMAKE_INSTALL_PREFIX="$work/build_out"
cmake --build "$work/build_out" --target binary -j "$(nproc)"
cmake --build "$work/build_out" --target package -j "$(nproc)"
package=$(ls "$work"/build_out/custom_opp_*.run)
say "built $package"
if [[ -n $install ]]; then
  bash "$package" --install-path="$install"
  say "installed; set ASCEND_CUSTOM_OPP_PATH=$install/vendors/$vendor"
fi
