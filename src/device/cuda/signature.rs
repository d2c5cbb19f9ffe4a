//! The parameters of a kernel as its source declares them, so that a launch with the wrong number or type of
//! arguments is an error at preparation, not silent corruption on the device.

use super::prep::Param;
use super::tensor_map::WORDS;

/// What one parameter takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Pointer,
    I32,
    U32,
    I64,
    U64,
    F32,
    /// How the tensor memory accelerator finds boxes of a tensor; a struct of this name.
    TensorMap,
    /// A type that this reader does not know (a macro): only its size is checked, once the kernel is loaded.
    Unknown,
}

impl Kind {
    pub fn of(param: &Param) -> Self {
        match param {
            Param::Ptr(_) => Kind::Pointer,
            Param::I32(_) => Kind::I32,
            Param::U32(_) => Kind::U32,
            Param::I64(_) => Kind::I64,
            Param::U64(_) => Kind::U64,
            Param::F32(_) => Kind::F32,
            Param::TensorMap(_) => Kind::TensorMap,
        }
    }
    /// Bytes on the device; `None`: unknown.
    pub fn size(self) -> Option<usize> {
        match self {
            Kind::Pointer | Kind::I64 | Kind::U64 => Some(8),
            Kind::I32 | Kind::U32 | Kind::F32 => Some(4),
            Kind::TensorMap => Some(8 * WORDS),
            Kind::Unknown => None,
        }
    }
    fn spelling(self) -> &'static str {
        match self {
            Kind::Pointer => "a pointer",
            Kind::I32 => "int",
            Kind::U32 => "unsigned",
            Kind::I64 => "long long",
            Kind::U64 => "unsigned long long",
            Kind::F32 => "float",
            Kind::TensorMap => "a tensor map",
            Kind::Unknown => "another type",
        }
    }
}

/// One declared parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declared {
    pub kind: Kind,
    pub name: String,
}

/// Every parameter list that `source` declares for `entry` (more than one where `#if` chooses between
/// kernels). `None`: there is no such `extern "C" __global__` function.
pub fn find(source: &str, entry: &str) -> Option<Vec<Vec<Declared>>> {
    let text = without_comments(source);
    let mut found = Vec::new();
    for (at, _) in text.match_indices("__global__") {
        let before = text[..at].trim_end();
        if !before.ends_with("\"C\"") && !before.ends_with('{') && !before.ends_with('}') {
            continue;
        }
        let Some((name, list)) = name_and_list(&text[at + "__global__".len()..]) else { continue };
        if name == entry {
            found.push(parse_list(list));
        }
    }
    (!found.is_empty()).then_some(found)
}

/// Checks arguments against one declared list. The error names the parameter.
pub fn check(declared: &[Declared], params: &[Param]) -> Result<(), String> {
    if declared.len() != params.len() {
        return Err(format!("declares {} parameters, {} were passed", declared.len(), params.len()));
    }
    for (i, (d, p)) in declared.iter().zip(params).enumerate() {
        let given = Kind::of(p);
        let fits = match d.kind {
            Kind::Unknown => !matches!(given, Kind::Pointer | Kind::TensorMap),
            kind => kind == given,
        };
        if !fits {
            return Err(format!(
                "parameter {i} `{}` is {}, {} was passed",
                d.name,
                d.kind.spelling(),
                given.spelling()
            ));
        }
    }
    Ok(())
}

fn without_comments(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let skip = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |e| e + 2)
        } else {
            out.push('/');
            1
        };
        rest = &rest[skip..];
    }
    out.push_str(rest);
    out
}

/// After `__global__`: skips `void` and attributes such as `__launch_bounds__(256)`; gives the function's name
/// and the text between its parentheses.
fn name_and_list(text: &str) -> Option<(&str, &str)> {
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
        let word = &rest[..end];
        rest = rest[end..].trim_start();
        match word {
            "" => return None,
            "void" | "static" | "inline" => {}
            _ => {
                let list = rest.starts_with('(').then(|| balanced(rest)).flatten()?;
                // Attributes start with two underscores and are followed by more words.
                if !word.starts_with("__") {
                    return Some((word, list));
                }
                rest = &rest[list.len() + 2..];
            }
        }
    }
}

/// The text inside the parentheses that `text` starts with.
fn balanced(text: &str) -> Option<&str> {
    let mut depth = 0;
    for (i, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&text[1..i]);
        }
    }
    None
}

fn parse_list(list: &str) -> Vec<Declared> {
    let mut out = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (i, c) in list.char_indices().chain([(list.len(), ',')]) {
        match c {
            '<' | '(' | '[' => depth += 1,
            '>' | ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                let piece = list[start..i].trim();
                if !piece.is_empty() && piece != "void" {
                    out.push(parse_param(piece));
                }
                start = i + 1;
            }
            _ => {}
        }
    }
    out
}

fn parse_param(piece: &str) -> Declared {
    let words: Vec<&str> =
        piece.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).collect();
    let name = words.last().copied().unwrap_or("?").to_owned();
    if piece.contains('*') || piece.contains('[') {
        return Declared { kind: Kind::Pointer, name };
    }
    let words: Vec<&str> = words[..words.len().saturating_sub(1)]
        .iter()
        .copied()
        .filter(|w| !matches!(*w, "const" | "volatile" | "__restrict__" | "__grid_constant__"))
        .collect();
    let kind = match words.join(" ").as_str() {
        "int" | "signed" | "signed int" => Kind::I32,
        "unsigned" | "unsigned int" | "u32" => Kind::U32,
        "long long" | "i64" | "long long int" => Kind::I64,
        "unsigned long long" | "u64" | "size_t" | "unsigned long long int" => Kind::U64,
        "float" => Kind::F32,
        "TensorMap" => Kind::TensorMap,
        _ => Kind::Unknown,
    };
    Declared { kind, name }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::prep::DevPtr;
    use proptest::prelude::*;

    const SOURCE: &str = r#"
        // extern "C" __global__ void not_this(int a) {}
        template <typename T> __global__ void nor_this(T* x) {}
        extern "C" __global__ void __launch_bounds__(256, 2)
        first(const bf16* __restrict__ x, /* rows, */ int rows, float eps, unsigned long long key,
              u32 draw, long long stride, OUT fill, const __grid_constant__ TensorMap map) { }
        extern "C" __global__ __launch_bounds__(THREADS) void second(void) {}
    "#;

    fn kinds(entry: &str) -> Option<Vec<Kind>> {
        find(SOURCE, entry).map(|l| l[0].iter().map(|d| d.kind).collect())
    }

    #[test]
    fn signatures_are_read() {
        use Kind::*;
        assert_eq!(kinds("first").unwrap(), [Pointer, I32, F32, U64, U32, I64, Unknown, TensorMap]);
        assert_eq!(kinds("second").unwrap(), []);
        assert_eq!(kinds("not_this"), None);
        assert_eq!(kinds("nor_this"), None);
        assert_eq!(find(SOURCE, "first").unwrap()[0][1].name, "rows");
    }

    #[test]
    fn a_wrong_argument_is_named() {
        let declared = &find("extern \"C\" __global__ void k(float* x, int n) {}", "k").unwrap()[0];
        assert_eq!(check(declared, &[Param::Ptr(DevPtr(1)), Param::I32(3)]), Ok(()));
        let e = check(declared, &[Param::Ptr(DevPtr(1)), Param::I64(3)]).unwrap_err();
        assert_eq!(e, "parameter 1 `n` is int, long long was passed");
        let e = check(declared, &[Param::Ptr(DevPtr(1))]).unwrap_err();
        assert_eq!(e, "declares 2 parameters, 1 were passed");
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in ".{0,200}") {
            let _ = find(&format!("extern \"C\" __global__ void k{text}"), "k");
        }
    }
}
