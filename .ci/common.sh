# What the gate and the nightly run share. Sourced by both, from the root of the project.
export PYTHON=${PYTHON:-python3}
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

# The folder of an environment that has jax with its CUDA plugin. It is gigabytes, so it outlives the run.
cuda_folder() {
  local hash
  hash=$({ "$1" --version; cat requirements-dev.txt requirements-gpu.txt requirements.txt; } | sha256sum | cut -c1-16)
  echo "${XDG_CACHE_HOME:-$HOME/.cache}/paxtrain/cuda-$hash"
}

# The lock is for runs side by side.
cuda_environment() {
  local cuda python=$1
  cuda=$(cuda_folder "$python")
  mkdir -p "$cuda"
  exec 9>"$cuda.lock"
  flock 9
  if [[ ! -e $cuda/complete ]]; then
    "$python" -m venv --clear "$cuda"
    "$cuda/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements-gpu.txt -r requirements-dev.txt
    touch "$cuda/complete"
  fi
  flock -u 9
}

# Compile for GPUs that are not there. A test that skips itself without the plugin fails here, because this environment
# has it. Tests may skip themselves for the jax that is in it.
cuda_compile() {
  local cuda report=$scratch/cuda
  cuda=$(cuda_folder "$1")
  JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "$cuda/bin/python" -m pytest -n 2 --dist loadgroup -rs \
    -p no:cacheprovider "${@:2}" | tee "$report"
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
version=
if [[ -n $newer ]]; then
  version=$("$newer" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  rm -rf ".venv-$version"
fi
# The other environments are made beside the first tests.
{
  if [[ -n $newer ]]; then
    make ".venv-$version/dev.txt" PYTHON="$newer" VENV=".venv-$version"
  fi
  cuda_environment "$PYTHON"
  if [[ -n $newer ]]; then
    cuda_environment "$newer"
  fi
} &
downloads=$!

# Run a command in the environment of the newer Python, or say that there is none.
on_newer() {
  if [[ -n $newer ]]; then
    "$@"
  else
    printf '\n== no Python newer than %s on this machine: left out: %s\n' "$("$PYTHON" --version)" "$*"
  fi
}
