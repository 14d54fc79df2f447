//! `etkv_set_log_callback`: the one subscriber of this library. It passes spans and events to the
//! host.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_void, CString};
use std::fmt::{Debug, Write};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use etkv_core::{fail, Error, Result, Status};
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, SpanRef};
use tracing_subscriber::{reload, EnvFilter, Layer, Registry};

use super::boundary::{c_functions, put, text};
use super::report::text_of;

/// Receives a message: its level, its target, the message, and the host's pointer.
#[allow(non_camel_case_types)]
pub type etkv_log_callback = unsafe extern "C" fn(i32, *const c_char, *const c_char, *mut c_void);

#[derive(Clone, Copy)]
enum Listener {
    /// The host's callback, and the pointer that it receives.
    Callback(etkv_log_callback, *mut c_void),
    /// Keeps at most this many messages for the host to take.
    Keep(usize),
}

// SAFETY: the host allows calls of the callback, with its pointer, on any thread.
unsafe impl Send for Listener {}
// SAFETY: as above.
unsafe impl Sync for Listener {}

/// The receiver of messages. It is read-locked while a callback runs, so that a callback is no longer running once it
/// has been replaced.
static LISTENER: RwLock<Option<Listener>> = RwLock::new(None);

/// A message that the host may take.
#[derive(Serialize)]
struct KeptMessage {
    level: i32,
    target: &'static str,
    message: String,
    /// Seconds since 1970.
    time: f64,
}

/// Messages that were kept and not taken. Locked briefly, and always as the last lock.
static KEPT: Mutex<VecDeque<KeptMessage>> = Mutex::new(VecDeque::new());

/// The filter of the messages; `None` before the first callback.
static FILTER: Mutex<Option<reload::Handle<EnvFilter, Registry>>> = Mutex::new(None);

thread_local! {
    /// Whether this thread is in the callback. Messages from inside the callback are dropped.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

c_functions!(
    /// Sets or removes the callback.
    unsafe fn etkv_set_log_callback(
        filter: *const c_char,
        callback: Option<etkv_log_callback>,
        user: *mut c_void,
    ) -> Result<()> {
        let Some(callback) = callback else {
            return remove();
        };
        let filter = if filter.is_null() { "info" } else { text(filter, "filter")? };
        listen(filter, Listener::Callback(callback, user))
    }

    /// Keeps messages instead of passing them to a callback.
    unsafe fn etkv_log_keep(filter: *const c_char, most: usize) -> Result<()> {
        if most == 0 {
            fail!(InvalidArgument, "most is 0, the minimum is 1");
        }
        let filter = if filter.is_null() { "info" } else { text(filter, "filter")? };
        listen(filter, Listener::Keep(most))
    }

    /// Stores the messages that were kept, and forgets them.
    unsafe fn etkv_log_take(json: *mut *mut c_char) -> Result<()> {
        put(json, "json", || {
            let kept = std::mem::take(&mut *KEPT.lock());
            if kept.is_empty() {
                Ok(std::ptr::null_mut())
            } else {
                text_of(&kept)
            }
        })
    }
);

fn listen(text: &str, listener: Listener) -> Result<()> {
    let filter = EnvFilter::builder().parse(text).map_err(|error| {
        Error::new(
            Status::InvalidArgument,
            format_args!(
                "filter is `{text}`, expected the syntax of RUST_LOG, as in `debug` or \
                 `etkv::core=trace,warn`: {error}"
            ),
        )
        .caused_by(error)
    })?;
    refuse_in_callback()?;
    let mut installed = FILTER.lock();
    if let Some(handle) = &*installed {
        *LISTENER.write() = Some(listener);
        return handle.reload(filter).map_err(gone);
    }
    let (filter, handle) = reload::Layer::new(filter);
    let subscriber = tracing_subscriber::registry().with(filter).with(MessageLayer);
    if tracing::subscriber::set_global_default(subscriber).is_err() {
        fail!(
            Unsupported,
            "this process already has a `tracing` subscriber, set by Rust code, and can have only one: \
             receive etkv's spans and events from it"
        );
    }
    *LISTENER.write() = Some(listener);
    *installed = Some(handle);
    Ok(())
}

fn remove() -> Result<()> {
    refuse_in_callback()?;
    let installed = FILTER.lock();
    *LISTENER.write() = None;
    match &*installed {
        Some(handle) => handle.reload(EnvFilter::new("off")).map_err(gone),
        None => Ok(()),
    }
}

/// Refuses a call inside the callback: the thread would wait for a lock that it holds.
fn refuse_in_callback() -> Result<()> {
    if IN_CALLBACK.try_with(Cell::get).unwrap_or(false) {
        fail!(
            Step,
            "cannot set the log callback from inside itself; set it when the callback is over"
        );
    }
    Ok(())
}

fn gone(error: reload::Error) -> Error {
    Error::new(Status::Internal, error)
}

/// Calls the host's callback, or keeps the message.
fn deliver(metadata: &'static Metadata<'static>, message: String) {
    let telling = IN_CALLBACK.try_with(|telling| telling.replace(true)).unwrap_or(true);
    if telling {
        return;
    }
    let (level, target) = (number(metadata.level()), metadata.target());
    // A message is one line.
    let message = message.replace(char::is_control, "?");
    match *LISTENER.read() {
        Some(Listener::Callback(callback, user)) => {
            let target = CString::new(target).unwrap_or_default();
            let message = CString::new(message).unwrap_or_default();
            // SAFETY: the host guarantees that the callback may be called with these arguments; the strings outlive the
            // call.
            unsafe { callback(level, target.as_ptr(), message.as_ptr(), user) };
        }
        Some(Listener::Keep(most)) => {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let mut kept = KEPT.lock();
            while kept.len() >= most {
                kept.pop_front();
            }
            kept.push_back(KeptMessage { level, target, message, time: time.as_secs_f64() });
        }
        None => {}
    }
    let _ = IN_CALLBACK.try_with(|telling| telling.set(false));
}

/// Returns the level's number in the header.
fn number(level: &Level) -> i32 {
    match *level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

/// The fields of a span, as text, and the time when it began.
struct SpanRecord {
    fields: Fields,
    began: Instant,
}

/// Makes messages from events, and from spans that end.
struct MessageLayer;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for MessageLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(SpanRecord { fields, began: Instant::now() });
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            if let Some(record) = span.extensions_mut().get_mut::<SpanRecord>() {
                values.record(&mut record.fields);
            }
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut message = String::new();
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            place(&mut message, &span);
        }
        message.push_str(&fields.message);
        message.push_str(&fields.others);
        deliver(event.metadata(), message);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let took = span.extensions().get::<SpanRecord>().map(|record| record.began.elapsed());
        let mut message = String::new();
        for span in span.scope().from_root() {
            place(&mut message, &span);
        }
        let micros = took.unwrap_or_default().as_micros();
        let _ = write!(message, "done took_us={micros}");
        deliver(span.metadata(), message);
    }
}

/// Adds the name of a message's span: `step{tokens=1 first=7}: `.
fn place<'a, S: LookupSpan<'a>>(message: &mut String, span: &SpanRef<'a, S>) {
    message.push_str(span.name());
    if let Some(record) = span.extensions().get::<SpanRecord>() {
        let fields = record.fields.others.trim_start();
        if !fields.is_empty() {
            let _ = write!(message, "{{{fields}}}");
        }
    }
    message.push_str(": ");
}

/// The fields of an event or a span: its message, and ` name=value` for each other field.
#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={value:?}"),
        };
    }
}
