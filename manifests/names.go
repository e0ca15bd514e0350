package manifests

// Labels, annotations, taints and finalizers of ours.
const (
	Prefix = "dunlin.dev/"

	// AnnotationPorts on a Pod of a node without a pod network: the port that
	// each containerPort really listens on, as "containerPort:port,...".
	AnnotationPorts = Prefix + "ports"
	// AnnotationLostSince on a Pod on an unreachable node: since when (RFC
	// 3339).
	AnnotationLostSince = Prefix + "lost-since"
	// AnnotationNominal on a Pod: the time that a schedule or owner meant it
	// for.
	AnnotationNominal = Prefix + "nominal-time"
	// AnnotationConfigHash and AnnotationConfigSource mark a Pod that mirrors
	// a static pod: the manifest's hash and where it came from.
	AnnotationConfigHash   = Prefix + "config.hash"
	AnnotationConfigSource = Prefix + "config.source"
	// AnnotationStopDeadline on a Pod: how long it may run without contact
	// (a Go duration), for at-most-one pods. Absent: for ever.
	AnnotationStopDeadline = Prefix + "stop-deadline"
	// AnnotationDisconnectPolicy on a Pod or template overrides what happens
	// to it when its node loses contact.
	AnnotationDisconnectPolicy = Prefix + "disconnect-policy"

	// LabelRuntimeWasm and LabelRuntimeOCI on a Node: "true" when it can run
	// such pods.
	LabelRuntimeWasm = Prefix + "runtime-wasm"
	LabelRuntimeOCI  = Prefix + "runtime-oci"

	// RuntimeClassWasm and RuntimeClassOCI exist from the first start.
	RuntimeClassWasm = "wasm"
	RuntimeClassOCI  = "oci"
	// HandlerWasm is the wasm class's handler.
	HandlerWasm = "wazero"

	// DefaultScheduler is spec.schedulerName's default, kept as upstream has
	// it so that manifests and clients agree.
	DefaultScheduler = "default-scheduler"
)
