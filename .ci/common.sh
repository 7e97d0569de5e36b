# What the gate and the nightly run share. Sourced by both, from the root of the project.
export PYTHON=${PYTHON:-python3}
unset PYTHONDONTWRITEBYTECODE  # as in the Makefile
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"; kill $(jobs -p) 2>/dev/null || true' EXIT

# Run a command under a title, and say how long it took.
step() {
  local title=$1 start=$SECONDS
  shift
  printf '\n== %s\n' "$title"
  "$@"
  printf '== %s: %d s\n' "$title" $((SECONDS - start))
}

# The newest Python above the one in use that can make environments, or nothing.
newer_python() {
  local minor candidate used
  used=$("$PYTHON" -c 'import sys; print(sys.version_info.minor)')
  for minor in 13 12; do
    ((minor > used)) || return 0
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python; do
      if "$candidate" -c "import ensurepip, sys; sys.exit(sys.version_info.minor != $minor)" 2>/dev/null; then
        echo "$candidate"
        return 0
      fi
    done
  done
}

# Print the folder of jax's CUDA plugin for an environment, with the assembler and the library whose attention it plans;
# make it first if it is not there. It outlives the run. Compiling needs no more: the libraries that programs call as
# they run are gigabytes. The lock is for runs side by side.
cuda_plugin() {
  local jax folder
  jax=$("$1/bin/python" -c 'import jax, sys; print("%s-py%d%d" % (jax.__version__, *sys.version_info[:2]))')
  folder=${XDG_CACHE_HOME:-$HOME/.cache}/paxtrain/cuda-$jax
  mkdir -p "$folder"
  exec 9>"$folder.lock"
  flock 9
  if [[ ! -e $folder/complete ]]; then
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target "$folder" \
      "jax-cuda12-plugin==${jax%-*}" "jax-cuda12-pjrt==${jax%-*}" "nvidia-cuda-nvcc-cu12<13" \
      "nvidia-cudnn-cu12<10" >&2
    touch "$folder/complete"
  fi
  flock -u 9
  echo "$folder"
}

# Compile for GPUs that are not there, in an environment. A test that skips itself without the plugin fails here, because
# it has it. Tests may skip themselves for the jax that is in it.
cuda_compile() {
  local plugin report=$scratch/cuda
  plugin=$(cuda_plugin "$1")
  PYTHONPATH=$plugin JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "$1/bin/python" -m pytest -n 2 \
    --dist loadgroup -rs -p no:cacheprovider "${@:2}" | tee "$report"
  if grep -q '^SKIPPED.*plugin' "$report"; then
    echo "error: the CUDA compile check skipped tests, though its environment has what they need" >&2
    return 1
  fi
}

# The control of the strict build: a copy with one broken link must not become a site.
docs_control() {
  local copy=$scratch/site
  mkdir "$copy"
  cp -r README.md mkdocs.yml docs compress paxtrain planner "$copy"
  printf '\n[nowhere](nowhere.md)\n' >> "$copy/docs/train.md"
  if NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --config-file "$copy/mkdocs.yml" 2> "$copy/log"; then
    echo "error: the site was built with a broken link" >&2
    return 1
  fi
  grep -q "nowhere.md" "$copy/log" || { cat "$copy/log" >&2; return 1; }
}

# What a user is told to run: lint for contributors, the site, ten steps of training.
users_commands() {
  step "lint" make lint
  step "docs" make docs
  step "docs with a broken link" docs_control
  step "short training run" make train \
    ARGS="--config.run.steps=10 --config.optimizer.warmup_steps=2 --config.run.out=$scratch/run"
}

# Wait for what runs beside other steps, show what it wrote, and fail if it has failed.
finish() {
  local code=0
  wait "$1" || code=$?
  cat "$2"
  return $code
}

rm -rf .venv
newer=$(newer_python)
version= downloads=
[[ -z $newer ]] || version=$("$newer" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# Make the environment of the newer Python, if there is one, beside what follows; `downloads` is the process to wait for.
start_downloads() {
  [[ -n $newer ]] || return 0
  rm -rf ".venv-$version"
  make ".venv-$version/dev.txt" PYTHON="$newer" VENV=".venv-$version" &
  downloads=$!
}

# Install the browser in which the plan's page is tested, where that is possible; the tests say so where it is not there.
install_browser() {
  command -v chromedriver > /dev/null || [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null ||
    (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
      chromium chromium-driver) > /dev/null || echo "no browser could be installed"
}

# Run a command in the environment of the newer Python, or say that there is none.
on_newer() {
  if [[ -n $newer ]]; then
    "$@"
  else
    printf '\n== no Python newer than %s on this machine: left out: %s\n' "$("$PYTHON" --version)" "$*"
  fi
}
