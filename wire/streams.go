package wire

// On a stream of kind exec or attach the control plane opens streams of
// wire/mux: StreamControl, and those of the others that ExecOpen asks for. On
// StreamControl it writes an ExecOpen, whereupon the node begins, and then
// TerminalSizes; the node writes one ExecEnd once all output was written.
// Giving up StreamControl, or the connection, ends a command.
const (
	StreamControl = "control"
	StreamStdin   = "stdin"
	StreamStdout  = "stdout"
	StreamStderr  = "stderr"
)

// ExecOpen begins a command in a container, or joins the container's own
// input and output. With TTY there is no Stderr.
type ExecOpen struct {
	Command []string `cbor:"1,keyasint,omitempty"` // exec only
	Stdin   bool     `cbor:"2,keyasint,omitempty"`
	Stdout  bool     `cbor:"3,keyasint,omitempty"`
	Stderr  bool     `cbor:"4,keyasint,omitempty"`
	TTY     bool     `cbor:"5,keyasint,omitempty"`
}

// TerminalSize is that of the client's terminal, in characters.
type TerminalSize struct {
	Width  uint16 `cbor:"1,keyasint"`
	Height uint16 `cbor:"2,keyasint"`
}

// ExecEnd tells how it ended: with ExitCode, or (Error) not by itself.
type ExecEnd struct {
	ExitCode int32  `cbor:"1,keyasint,omitempty"`
	Error    string `cbor:"2,keyasint,omitempty"`
}

// DialRequest is what a stream of wire/mux is for that the control plane
// opens on a stream of kind portforward. The node answers with a DialReply;
// without an Error the bytes of the connection follow, in both directions.
type DialRequest struct {
	Port int32 `cbor:"1,keyasint"`
	// Address asks for the pod's own address, as its neighbours reach it,
	// instead of its loopback.
	Address bool `cbor:"2,keyasint,omitempty"`
}

// DialReply answers a DialRequest.
type DialReply struct {
	Error string `cbor:"1,keyasint,omitempty"`
}

// WireType implements Message.
func (ExecOpen) WireType() Type { return TypeExecOpen }

// WireType implements Message.
func (TerminalSize) WireType() Type { return TypeTerminalSize }

// WireType implements Message.
func (ExecEnd) WireType() Type { return TypeExecEnd }

// WireType implements Message.
func (DialRequest) WireType() Type { return TypeDialRequest }

// WireType implements Message.
func (DialReply) WireType() Type { return TypeDialReply }
