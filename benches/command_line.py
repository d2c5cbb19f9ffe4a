"""What the scripts of this folder look at before they measure: arguments, variables of the environment, mbperf and the files to be
written. What is wrong there is one sentence on standard error and exit code 2; what the machine lacks is exit code 1. No PyTorch."""
import csv, importlib.util, os, re, subprocess, sys

# What mbperf takes for --max_time.
LEAST_SECONDS, MOST_SECONDS = 0.001, 30 * 24 * 3600


def script():
    return os.path.basename(sys.argv[0])


def refuse(said):
    print(f"{script()}: {said}", file=sys.stderr)
    sys.exit(2)


def arguments(doc, least, most=None):
    """Words of the command line: `least` to `most` of them (None: any number). `doc`: the script's own words, with its usage."""
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        print(doc.strip())
        sys.exit(0)
    usage = re.search(r"usage:.*?(?=\n\s*\n|\Z)", doc, re.DOTALL).group(0).strip()
    for word in words:
        if word.startswith("-"):
            refuse(f"no option {word}\n{usage}")
    if len(words) < least:
        refuse(f"an argument is missing\n{usage}")
    if most is not None and len(words) > most:
        refuse(f"{words[most]}: one argument too many\n{usage}")
    return words


def known(words, names, what="workload"):
    """Ends the script where a word is none of `names`."""
    unknown = [w for w in words if w not in names]
    if unknown:
        refuse(f"no {what} {', '.join(unknown)}: known are {', '.join(names)}")


def seconds(variable, default):
    """A length of measuring from the environment, as text; unset or empty: the default."""
    text = os.environ.get(variable) or default
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not LEAST_SECONDS <= float(text) <= MOST_SECONDS:
        refuse(f"{variable}={text}: a number of seconds is needed, {LEAST_SECONDS} to {MOST_SECONDS}, such as 2 or 0.5")
    return text


def choice(variable, default, values):
    """One of `values` from the environment; unset or empty: the default."""
    text = os.environ.get(variable) or default
    if text not in values:
        refuse(f"{variable}={text}: {' or '.join(values)} is needed")
    return text


def runnable(mbperf):
    """Ends the script where this mbperf cannot be run."""
    try:
        done = subprocess.run([mbperf, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except (OSError, ValueError) as e:
        refuse(f"mbperf cannot be run: {mbperf or 'an empty name'}: {getattr(e, 'strerror', None) or e}")
    if done.returncode:
        refuse(f"mbperf cannot be run: {mbperf} --version: exit {done.returncode} {done.stderr.strip()[-500:]}")


def writable(path):
    """Ends the script where a file cannot be made or replaced, as far as its folder tells."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        refuse(f"{path or 'an empty name'} cannot be written: there is no folder {folder}")
    if not path or os.path.exists(path) and not os.path.isfile(path):
        refuse(f"{path or 'an empty name'} cannot be written: it is no file")
    if not os.access(folder, os.W_OK | os.X_OK):
        refuse(f"{path} cannot be written: the folder {folder} takes no files")


def lacking(*modules):
    """Which of these modules Python has not got. Loads none: that they load is another matter."""
    return [m for m in modules if importlib.util.find_spec(m) is None]


def installed(*modules):
    """Ends the script (1) where Python has not got these modules."""
    if missing := lacking(*modules):
        sys.exit(f"{script()}: {sys.executable} has no {', '.join(missing)}: run this with a Python that has it (PYTHONPATH counts)")


class Replaced:
    """A text file that is written beside its place, as PATH.new, and takes it once all of it is there: an earlier file is kept where the
    script ends before. Opened at once, so that a place that cannot be written is found before anything is measured."""

    def __init__(self, path):
        # Behind a link the file is replaced, not the link.
        self.path = os.path.realpath(path) if os.path.islink(path) else path
        self.new = self.path + ".new"

    def __enter__(self):
        writable(self.path)
        try:
            self.file = open(self.new, "w", newline="")
        except OSError as e:
            refuse(f"{self.new} cannot be written: {e.strerror}")
        return self.file

    def __exit__(self, failed, *_):
        self.file.close()
        if failed is None:
            os.replace(self.new, self.path)


class Table(Replaced):
    """The same of a CSV, a row at a time: those before a failure are kept as PATH.new."""

    def __init__(self, path, columns):
        super().__init__(path)
        self.columns, self.rows = columns, 0

    def __enter__(self):
        self.out = csv.writer(super().__enter__())
        self.out.writerow(self.columns)
        return self

    def row(self, cells):
        self.out.writerow(cells)
        self.file.flush()
        self.rows += 1

    def __exit__(self, failed, *more):
        super().__exit__(failed, *more)
        if failed is None:
            return
        there = "is as it was" if os.path.exists(self.path) else "is not written"
        if self.rows:
            print(f"{script()}: not all was measured: {self.path} {there}; {self.new} holds the {self.rows} rows before", file=sys.stderr)
        else:
            os.remove(self.new)
            print(f"{script()}: nothing was measured: {self.path} {there}", file=sys.stderr)
