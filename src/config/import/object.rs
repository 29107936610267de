//! Reading JSON objects so that nothing in them goes unsaid: a key is taken, or it ends up in a note.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::super::problem::Problem;
use super::Note;

/// What is said about the input.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) notes: Vec<Note>,
    pub(super) problems: Vec<Wrong>,
}

/// Something that cannot be done, or makes no sense.
#[derive(Debug)]
pub(super) struct Wrong {
    path: String,
    reason: String,
    remedy: String,
}

impl Wrong {
    pub(super) fn of(self, file: &str) -> Problem {
        Problem { file: file.to_owned(), line: None, key: self.path, reason: self.reason, remedy: self.remedy }
    }
}

impl Report {
    /// A setting is not carried over.
    pub(super) fn note(&mut self, path: impl Into<String>, reason: impl Into<String>) {
        self.notes.push(Note { path: path.into(), reason: reason.into() });
    }

    /// The input is refused.
    pub(super) fn refuse(&mut self, path: impl Into<String>, reason: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Wrong { path: path.into(), reason: reason.into(), remedy: remedy.into() });
    }
}

/// A JSON object at a path, and which of its keys were asked for.
pub(super) struct Object<'a> {
    map: &'a Map<String, Value>,
    path: String,
    asked: BTreeSet<&'static str>,
}

impl<'a> Object<'a> {
    pub(super) fn root(map: &'a Map<String, Value>) -> Self {
        Self { map, path: String::new(), asked: BTreeSet::new() }
    }

    /// The path of a key.
    pub(super) fn at(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// A value that is there and not null.
    pub(super) fn value(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.insert(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Text; an empty one counts as none.
    pub(super) fn text(&mut self, key: &'static str, report: &mut Report) -> Option<String> {
        match self.value(key)? {
            Value::String(text) if text.trim().is_empty() => None,
            Value::String(text) => Some(text.trim().to_owned()),
            Value::Number(number) => Some(number.to_string()),
            _ => self.wrong(key, "is no text", "give a string", report),
        }
    }

    /// Text that has to be there.
    pub(super) fn needed(&mut self, key: &'static str, report: &mut Report) -> Option<String> {
        let before = report.problems.len();
        let text = self.text(key, report);
        if text.is_none() && report.problems.len() == before {
            report.refuse(self.at(key), "is missing", "add it");
        }
        text
    }

    /// A number, also one in a string, as configfs has them.
    pub(super) fn number(&mut self, key: &'static str, report: &mut Report) -> Option<i64> {
        let value = self.value(key)?;
        let number = match value {
            Value::Number(number) => number.as_i64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        number.or_else(|| self.wrong(key, "is no whole number", "give one", report))
    }

    /// True or false, also as 1 and 0.
    pub(super) fn flag(&mut self, key: &'static str, report: &mut Report) -> Option<bool> {
        match self.value(key)? {
            Value::Bool(flag) => Some(*flag),
            Value::Number(number) if number.as_i64() == Some(0) => Some(false),
            Value::Number(number) if number.as_i64() == Some(1) => Some(true),
            Value::String(text) if matches!(text.trim(), "0" | "false" | "n" | "N") => Some(false),
            Value::String(text) if matches!(text.trim(), "1" | "true" | "y" | "Y") => Some(true),
            _ => self.wrong(key, "is neither on nor off", "give true or false", report),
        }
    }

    /// An object below; an empty one when it is not there.
    pub(super) fn object(&mut self, key: &'static str, report: &mut Report) -> Option<Self> {
        match self.value(key)? {
            Value::Object(map) => Some(Object { map, path: self.at(key), asked: BTreeSet::new() }),
            _ => self.wrong(key, "is no object", "give an object", report),
        }
    }

    /// The objects of a list.
    pub(super) fn objects(&mut self, key: &'static str, report: &mut Report) -> Vec<Self> {
        let mut objects = Vec::new();
        for (place, value) in self.list(key, report) {
            match value {
                Value::Object(map) => objects.push(Object { map, path: place, asked: BTreeSet::new() }),
                _ => report.refuse(place, "is no object", "give an object"),
            }
        }
        objects
    }

    /// The texts of a list, with their paths.
    pub(super) fn texts(&mut self, key: &'static str, report: &mut Report) -> Vec<(String, String)> {
        let mut texts = Vec::new();
        for (place, value) in self.list(key, report) {
            match value {
                Value::String(text) => texts.push((place, text.clone())),
                _ => report.refuse(place, "is no text", "give a string"),
            }
        }
        texts
    }

    fn list(&mut self, key: &'static str, report: &mut Report) -> Vec<(String, &'a Value)> {
        let path = self.at(key);
        match self.value(key) {
            None => Vec::new(),
            Some(Value::Array(values)) => {
                values.iter().enumerate().map(|(place, value)| (format!("{path}[{place}]"), value)).collect()
            }
            Some(_) => {
                report.refuse(path, "is no list", "give a list");
                Vec::new()
            }
        }
    }

    fn wrong<T>(&self, key: &str, reason: &str, remedy: &str, report: &mut Report) -> Option<T> {
        report.refuse(self.at(key), reason, remedy);
        None
    }

    /// A setting without a counterpart: said unless it is what is done here anyway.
    pub(super) fn not_carried(&mut self, key: &'static str, usual: &[&str], reason: &str, report: &mut Report) {
        let path = self.at(key);
        let Some(value) = self.value(key) else { return };
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if !usual.contains(&text.trim()) {
            report.note(path, reason);
        }
    }

    /// Whatever nobody asked for is said.
    pub(super) fn finish(self, report: &mut Report) {
        self.finish_with("has no counterpart here", report);
    }

    pub(super) fn finish_with(self, reason: &str, report: &mut Report) {
        for (key, value) in self.map {
            if !self.asked.contains(key.as_str()) && !value.is_null() {
                report.note(self.at(key), reason);
            }
        }
    }
}
