# What the scripts of this folder look at before they run anything; sourced from the repository's root. What is wrong is one
# sentence on standard error and exit code 2.

refuse() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}
# With -h or --help as the first argument: the comment at the script's head, and the end.
help_if_asked() {
    case ${1:-} in
        -h | --help)
            sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p; }' "benches/$(basename "$0")"
            exit 0
            ;;
    esac
}
choose() { # KNOWN DEFAULT WORDS...: `parts`, the words or else the default
    local known=$1 default=$2 word words=()
    shift 2
    read -rd '' -a words <<<"$*" || true
    for word in ${words[@]+"${words[@]}"}; do
        [[ " $known " == *" $word "* ]] || refuse "no part $word: known are $known"
    done
    parts=${words[*]:-$default}
}
wants() { [[ " $parts " == *" $1 "* ]]; }
# Of a variable that may be unset or empty: a number of seconds, as mbperf takes it.
seconds_in() {
    [[ -z ${!1:-} || ${!1} =~ ^[0-9]+(\.[0-9]+)?$ && ${!1} =~ [1-9] ]] ||
        refuse "$1=${!1}: a number of seconds above 0 is needed, such as 2 or 0.5"
}
# Of a variable that switches: 1 is on; unset, empty and 0 are off.
switch_in() {
    case ${!1:-} in
        '' | 0) unset "$1" ;;
        1) ;;
        *) refuse "$1=${!1}: 1 or nothing is needed" ;;
    esac
}
# `mbperf` runs, and `out` is a folder that takes files. Paths are from the repository's root.
begin() {
    "$mbperf" --version </dev/null >/dev/null 2>&1 || refuse "mbperf cannot be run: $mbperf --version: exit $? (in $PWD)"
    mkdir -p "$out" && [ -w "$out" ] || refuse "the output folder $out cannot be made or written (in $PWD)"
    marks=$(mktemp -d) && : >"$marks/writable" || refuse "no temporary folder can be made (TMPDIR=${TMPDIR:-})"
    trap 'rm -rf "$marks"; kill $(jobs -p) 2>/dev/null || true' EXIT
    # A row that is interrupted ends with 130 itself, where it is in the foreground.
    trap 'exit 130' INT
    trap 'exit 143' TERM
}
# What a part says of itself, in whichever process it runs, and the script's exit code from it. The mark lies in a folder of this process
# alone: scripts that are called by it, or that write to the same output folder, have their own.
failed() { : >>"$marks/failed"; }
ended() { [ ! -e "$marks/failed" ]; }
