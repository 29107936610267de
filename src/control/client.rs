//! The other end of the control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::Value;

use super::protocol::{Answer, Failure, Request};

/// A connection to a running target.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

/// A request did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The target refused it; nothing has changed.
    #[error("{0}")]
    Refused(Failure),
    /// The socket cannot be used.
    #[error("control socket: {0}; see that a target runs with this --control")]
    Socket(#[from] std::io::Error),
    /// The answer is none that this version knows.
    #[error("control socket: the answer makes no sense ({0}); use the same version on both ends")]
    Answer(String),
}

impl Client {
    /// Connects to a target's socket.
    ///
    /// # Errors
    /// Nobody listens there, or this user may not connect.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        Ok(Self { stream: BufReader::new(UnixStream::connect(path)?) })
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// It was refused, or the connection broke.
    pub fn request(&mut self, request: &Request) -> Result<Value, ClientError> {
        let mut text = serde_json::to_vec(request).map_err(|error| ClientError::Answer(error.to_string()))?;
        text.push(b'\n');
        self.stream.get_mut().write_all(&text)?;
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        match serde_json::from_str(&line).map_err(|error| ClientError::Answer(error.to_string()))? {
            Answer::Ok(value) => Ok(value),
            Answer::Error(failure) => Err(ClientError::Refused(failure)),
        }
    }
}
