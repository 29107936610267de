//! Reading a TOML table key by key, collecting everything that is wrong with it.

use std::fmt::Display;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::Problem;
use super::size::{Bytes, parse_size};

/// The problems of one file.
pub(super) struct Problems<'t> {
    file: &'t str,
    text: &'t str,
    pub(super) found: Vec<Problem>,
}

impl<'t> Problems<'t> {
    pub(super) fn new(file: &'t str, text: &'t str) -> Self {
        Self { file, text, found: Vec::new() }
    }

    /// The line of a place in the text, counted from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        1 + self.text.bytes().take(at).filter(|byte| *byte == b'\n').count()
    }

    /// Notes a problem at a place in the text.
    pub(super) fn add(&mut self, at: usize, key: &str, reason: impl Display, remedy: impl Display) {
        let line = self.line(at);
        self.found.push(Problem {
            file: self.file.to_owned(),
            line: Some(line),
            key: key.to_owned(),
            reason: reason.to_string(),
            remedy: remedy.to_string(),
        });
    }
}

/// A value with its place.
#[derive(Clone, Debug)]
pub(super) struct At<T> {
    pub(super) value: T,
    pub(super) at: usize,
}

/// A table being read. Keys that nobody asked for by the end are unknown.
pub(super) struct Section<'a, 'i> {
    table: &'a DeTable<'i>,
    /// As in `subsystem.namespace`; empty for the file itself.
    name: &'static str,
    at: usize,
    asked: Vec<&'static str>,
}

impl<'a, 'i> Section<'a, 'i> {
    pub(super) fn new(table: &'a DeTable<'i>, name: &'static str, at: usize) -> Self {
        Self { table, name, at, asked: Vec::new() }
    }

    /// Where it begins.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// A key's full name.
    pub(super) fn key(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    pub(super) fn string(&mut self, key: &'static str, problems: &mut Problems<'_>) -> Option<At<String>> {
        let value = self.take(key)?;
        match value.get_ref().as_str() {
            Some(text) => Some(At { value: text.to_owned(), at: value.span().start }),
            None => self.wrong(key, value, "a string in quotes", problems),
        }
    }

    pub(super) fn bool(&mut self, key: &'static str, problems: &mut Problems<'_>) -> Option<bool> {
        let value = self.take(key)?;
        match value.get_ref().as_bool() {
            Some(flag) => Some(flag),
            None => self.wrong(key, value, "true or false", problems),
        }
    }

    /// A whole number in a range.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        range: Range<u64>,
        problems: &mut Problems<'_>,
    ) -> Option<At<u64>> {
        let value = self.take(key)?;
        let wanted = format!("a number from {} to {}", range.start, range.end - 1);
        let Some(number) = number_of(value.get_ref()) else { return self.wrong(key, value, &wanted, problems) };
        let at = value.span().start;
        match number {
            Some(number) if range.contains(&number) => Some(At { value: number, at }),
            _ => {
                problems.add(at, &self.key(key), "is out of range", format!("give {wanted}"));
                None
            }
        }
    }

    /// A size: a number of bytes, or a string such as `"64K"`.
    pub(super) fn size(
        &mut self,
        key: &'static str,
        range: Range<u64>,
        problems: &mut Problems<'_>,
    ) -> Option<At<u64>> {
        let value = self.take(key)?;
        let at = value.span().start;
        let parsed = match value.get_ref() {
            DeValue::String(text) => parse_size(text),
            other => match number_of(other) {
                Some(number) => number.ok_or_else(|| "is out of range".into()),
                None => return self.wrong(key, value, "a size such as \"64K\" or \"1G\"", problems),
            },
        };
        let (low, high) = (Bytes(range.start), Bytes(range.end - 1));
        let reason = match parsed {
            Ok(size) if range.contains(&size) => return Some(At { value: size, at }),
            Ok(size) => format!("{} is out of range", Bytes(size)),
            Err(reason) => reason,
        };
        problems.add(
            at,
            &self.key(key),
            reason,
            format!("give a size from \"{low}\" to \"{high}\", as in \"64K\" or \"1G\""),
        );
        None
    }

    pub(super) fn strings(&mut self, key: &'static str, problems: &mut Problems<'_>) -> Option<Vec<At<String>>> {
        let value = self.take(key)?;
        let Some(array) = value.get_ref().as_array() else {
            return self.wrong(key, value, "a list of strings, as in [\"..\"]", problems);
        };
        let mut strings = Vec::new();
        for item in array.iter() {
            match item.get_ref().as_str() {
                Some(text) => strings.push(At { value: text.to_owned(), at: item.span().start }),
                None => {
                    self.wrong::<()>(key, item, "strings only", problems);
                }
            }
        }
        Some(strings)
    }

    /// A table: `[key]`, or `key = { .. }`.
    pub(super) fn section(
        &mut self,
        key: &'static str,
        name: &'static str,
        problems: &mut Problems<'_>,
    ) -> Option<Self> {
        let value = self.take(key)?;
        match value.get_ref().as_table() {
            Some(table) => Some(Section::new(table, name, value.span().start)),
            None => self.wrong(key, value, &format!("a table: [{name}]"), problems),
        }
    }

    /// Tables: `[[key]]`.
    pub(super) fn sections(&mut self, key: &'static str, name: &'static str, problems: &mut Problems<'_>) -> Vec<Self> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let wanted = format!("tables: [[{name}]]");
        let Some(array) = value.get_ref().as_array() else {
            self.wrong::<()>(key, value, &wanted, problems);
            return Vec::new();
        };
        let mut sections = Vec::new();
        for item in array.iter() {
            match item.get_ref().as_table() {
                Some(table) => sections.push(Section::new(table, name, item.span().start)),
                None => {
                    self.wrong::<()>(key, item, &wanted, problems);
                }
            }
        }
        sections
    }

    /// Reports the keys that nobody asked for.
    pub(super) fn finish(self, problems: &mut Problems<'_>) {
        for (key, _) in self.table.iter() {
            let name = key.get_ref().as_ref();
            if self.asked.contains(&name) {
                continue;
            }
            let near = self.asked.iter().find(|asked| is_near(asked, name));
            let remedy = match near {
                Some(near) => format!("did you mean {near}?"),
                None => format!("known here: {}", self.asked.join(", ")),
            };
            problems.add(key.span().start, &self.key(name), "is no key that exists", remedy);
        }
    }

    fn take(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'i>>> {
        self.asked.push(key);
        self.table.get(key)
    }

    fn wrong<T>(
        &self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        wanted: &str,
        problems: &mut Problems<'_>,
    ) -> Option<T> {
        let reason = format!("is of the wrong type ({})", value.get_ref().type_str());
        problems.add(value.span().start, &self.key(key), reason, format!("give {wanted}"));
        None
    }
}

/// A whole number: `Some(None)` when it does not fit.
fn number_of(value: &DeValue<'_>) -> Option<Option<u64>> {
    let integer = value.as_integer()?;
    Some(u64::from_str_radix(integer.as_str(), integer.radix()).ok())
}

/// Whether two names differ in one letter at most: changed, missing, added, or swapped with its neighbour.
fn is_near(one: &str, two: &str) -> bool {
    let (one, two): (Vec<char>, Vec<char>) = (one.chars().collect(), two.chars().collect());
    let head = one.iter().zip(&two).take_while(|(one, two)| one == two).count();
    let (one, two) = (&one[head..], &two[head..]);
    match (one, two) {
        ([a, b, one @ ..], [c, d, two @ ..]) if (a, b) == (d, c) => one == two,
        ([_, one @ ..], [_, two @ ..]) if one == two => true,
        ([_, one @ ..], two) if one == two => true,
        (one, [_, two @ ..]) => one == two,
        _ => one.is_empty() && two.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_one_slip_apart() {
        for (one, two) in [("size", "sise"), ("size", "siz"), ("size", "sizes"), ("size", "szie"), ("hosts", "host")] {
            assert!(is_near(one, two) && is_near(two, one), "{one} {two}");
        }
        for (one, two) in [("size", "file"), ("nqn", "nsid"), ("uuid", "")] {
            assert!(!is_near(one, two), "{one} {two}");
        }
    }
}
