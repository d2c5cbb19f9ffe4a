//! Two dialects of the result files: RFC 4180, and what a spreadsheet opens by a double click where the decimal
//! sign is a comma.
//!
//! `excel_eu`: UTF-8 byte-order mark, semicolons, decimal commas, and no text that a spreadsheet takes for a formula.
//! Such text gets an apostrophe in front, and so does text that begins with one: reading takes one away again.

use super::columns::Kind;
use clap::ValueEnum;

/// How the bytes of a result file stand for its cells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Dialect {
    /// Comma, decimal point: RFC 4180
    #[default]
    Rfc4180,
    /// Semicolon, decimal comma, UTF-8 byte-order mark; free text cannot act as a formula
    ExcelEu,
}

/// What spreadsheets look for to tell UTF-8 from the machine's code page.
pub const BYTE_ORDER_MARK: &str = "\u{feff}";
/// First characters that make a cell a formula, or are skipped before one is looked for; the full-width forms count
/// as the others in some locales.
const ACTIVE: [char; 12] = ['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠', GUARD];
/// Says "text" to a spreadsheet's user, and to [`Dialect::read`].
const GUARD: char = '\'';

impl Dialect {
    /// Name as `--csv_dialect` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Rfc4180 => "rfc4180",
            Dialect::ExcelEu => "excel_eu",
        }
    }

    pub fn separator(self) -> u8 {
        match self {
            Dialect::Rfc4180 => b',',
            Dialect::ExcelEu => b';',
        }
    }

    /// What the file begins with.
    pub fn mark(self) -> &'static str {
        match self {
            Dialect::Rfc4180 => "",
            Dialect::ExcelEu => BYTE_ORDER_MARK,
        }
    }

    /// The dialect of a file by its first line: names of columns hold neither sign.
    pub fn of(bytes: &[u8]) -> Self {
        let line = bytes.split(|b| *b == b'\n').next().unwrap_or_default();
        if line.contains(&b';') && !line.contains(&b',') { Dialect::ExcelEu } else { Dialect::Rfc4180 }
    }

    /// A header line without its end.
    pub fn header(self, names: &[&str]) -> String {
        format!("{}{}", self.mark(), names.join(char::from(self.separator()).encode_utf8(&mut [0; 4])))
    }

    /// The cell of a plain value ([`super::Value::cell`]) in this dialect.
    pub fn write(self, plain: &str, kind: Kind) -> String {
        match (self, kind) {
            (Dialect::ExcelEu, Kind::Float | Kind::Int) => plain.replace('.', ","),
            (Dialect::ExcelEu, Kind::Text) if plain.starts_with(ACTIVE) => format!("{GUARD}{plain}"),
            _ => plain.to_owned(),
        }
    }

    /// The plain value of a cell.
    ///
    /// # Errors
    /// A number with a point, which may stand for thousands.
    pub fn read(self, cell: &str, kind: Kind) -> Result<String, String> {
        match (self, kind) {
            (Dialect::ExcelEu, Kind::Float | Kind::Int) => {
                if cell.contains('.') {
                    return Err(format!(
                        "{cell:?} has a point: in a file with semicolons numbers have a decimal comma and no grouping"
                    ));
                }
                Ok(cell.replace(',', "."))
            }
            (Dialect::ExcelEu, Kind::Text) => Ok(cell.strip_prefix(GUARD).unwrap_or(cell).to_owned()),
            // Spreadsheets save them in capitals.
            (_, Kind::Bool) if ["true", "false"].iter().any(|b| cell.eq_ignore_ascii_case(b)) => {
                Ok(cell.to_ascii_lowercase())
            }
            _ => Ok(cell.to_owned()),
        }
    }
}

/// A file without the line `sep=;` that tells a spreadsheet its separator: the header follows.
pub fn without_sep(bytes: &[u8]) -> &[u8] {
    let text = bytes.strip_prefix(BYTE_ORDER_MARK.as_bytes()).unwrap_or(bytes);
    let end = text.iter().position(|b| *b == b'\n').filter(|_| text.starts_with(b"sep="));
    end.map_or(bytes, |end| &text[end + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_line_tells() {
        for dialect in [Dialect::Rfc4180, Dialect::ExcelEu] {
            assert_eq!(Dialect::of(dialect.header(&["a", "b"]).as_bytes()), dialect);
        }
        // Saved again without the mark.
        assert_eq!(Dialect::of(b"schema_version;run_id\r\n1;a,b\r\n"), Dialect::ExcelEu);
        assert_eq!(Dialect::of(b""), Dialect::Rfc4180);
    }

    #[test]
    fn the_line_that_names_the_separator_is_none_of_the_table() {
        for (file, rest) in [
            ("sep=;\r\na;b\r\n", "a;b\r\n"),
            ("\u{feff}sep=,\na,b\n", "a,b\n"),
            ("\u{feff}a;b\n", "\u{feff}a;b\n"),
        ] {
            assert_eq!(without_sep(file.as_bytes()), rest.as_bytes());
        }
    }

    #[test]
    fn a_grouped_number_is_refused() {
        assert!(Dialect::ExcelEu.read("1.462", Kind::Float).is_err());
        assert_eq!(Dialect::ExcelEu.read("-1462,5", Kind::Float).unwrap(), "-1462.5");
    }

    #[test]
    fn booleans_are_read_as_spreadsheets_write_them() {
        for dialect in [Dialect::Rfc4180, Dialect::ExcelEu] {
            for (cell, plain) in
                [("TRUE", "true"), ("False", "false"), ("true", "true"), ("0", "0"), ("", "")]
            {
                assert_eq!(dialect.read(cell, Kind::Bool).unwrap(), plain);
            }
            assert_eq!(dialect.read("TRUE", Kind::Text).unwrap(), "TRUE");
        }
    }

    proptest! {
        #[test]
        fn text_comes_back_and_never_acts(text in "[=+@'\\-\t\r\n＝a;,\"]{0,4}\\PC*") {
            let cell = Dialect::ExcelEu.write(&text, Kind::Text);
            prop_assert!(!cell.starts_with(['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠']));
            prop_assert_eq!(Dialect::ExcelEu.read(&cell, Kind::Text).unwrap(), text);
        }

        #[test]
        fn numbers_come_back(x in prop::num::f64::NORMAL) {
            let plain = crate::report::columns::number(x);
            let cell = Dialect::ExcelEu.write(&plain, Kind::Float);
            prop_assert!(!cell.contains('.'));
            prop_assert_eq!(Dialect::ExcelEu.read(&cell, Kind::Float).unwrap(), plain);
        }
    }
}
