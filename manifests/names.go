package manifests

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/internal/outbound"
)

// Labels, annotations, taints and finalizers of ours.
const (
	Prefix = "dunlin.dev/"

	// AnnotationPorts on a Pod of a node without a pod network: the port that
	// each containerPort really listens on, as "containerPort:port,...".
	AnnotationPorts = Prefix + "ports"
	// AnnotationLostSince on a Pod on an unreachable node: since when (RFC
	// 3339).
	AnnotationLostSince = Prefix + "lost-since"
	// AnnotationReturned on a Pod that was lost: its node is back with it.
	AnnotationReturned = Prefix + "returned"
	// AnnotationReplaces and AnnotationSuperseded on a Pod of a Job: which lost
	// pod it stands in for, and that another one stands in for it.
	AnnotationReplaces   = Prefix + "replaces"
	AnnotationSuperseded = Prefix + "superseded"
	// AnnotationPlacement on a Pod: "spread" places it where most is free, and
	// "pack", as without it, where it fits closest.
	AnnotationPlacement = Prefix + "placement"
	// AnnotationNominal on a Pod: the time that a schedule or owner meant it
	// for.
	AnnotationNominal = Prefix + "nominal-time"
	// AnnotationConfigHash and AnnotationConfigSource mark a Pod that mirrors
	// a static pod: the manifest's hash and where it came from.
	AnnotationConfigHash   = Prefix + "config.hash"
	AnnotationConfigSource = Prefix + "config.source"
	// AnnotationStopDeadline on a Pod: it stops by itself when its node has
	// been without contact for that long (a Go duration), and is then not
	// started again offline. Absent: it runs on.
	AnnotationStopDeadline = Prefix + "stop-deadline"
	// AnnotationReplaceAfter on a Pod: how long after its node was given up it
	// is replaced (a Go duration), or "never". Absent: by its controller's kind.
	AnnotationReplaceAfter = Prefix + "replace-after"
	// AnnotationOnReturn on a Pod: which of it and its replacement is kept when
	// its node is back: original, replacement or better. Absent: original.
	AnnotationOnReturn = Prefix + "on-return"
	// AnnotationWeight on a Pod: its share of the new connections of its
	// Services beside other pods' (1 to MaxWeight). Absent: 100.
	AnnotationWeight = Prefix + "weight"
	// AnnotationWeights on an EndpointSlice: its endpoints' weights by their
	// first address (a JSON object). A slice of a Service with a selector has
	// it from its pods; on others people write it.
	AnnotationWeights = Prefix + "weights"
	// AnnotationAutoRollback on a Deployment: "true" goes back to the last
	// revision that has proven itself when a new one exceeds its
	// progress deadline; a percentage does so also as soon as so many of the
	// new pods fail again and again.
	AnnotationAutoRollback = Prefix + "auto-rollback"
	// AnnotationRolledBack on a Deployment: the last such rollback (JSON);
	// AnnotationGoodRevision on a ReplicaSet: the revision as which it has
	// proven itself: for the whole deadline, all pods available.
	AnnotationRolledBack   = Prefix + "rolled-back"
	AnnotationGoodRevision = Prefix + "good-revision"
	// AnnotationIgnoredOwners on anything with owner references into another
	// namespace: the uids of those owners, separated by commas. The registry
	// keeps it as long as the references are there.
	AnnotationIgnoredOwners = Prefix + "ignored-owners"

	// AnnotationOutbound on a Pod: what its Wasm guests may connect to, as
	// HOST:PORT entries (package outbound). Absent: nothing.
	AnnotationOutbound = outbound.Annotation
	// AnnotationSSLRedirect on an Ingress: "true" answers HTTP with a redirect
	// to HTTPS, for hosts in spec.tls; ACME's challenges are still answered.
	AnnotationSSLRedirect = Prefix + "ssl-redirect"
	// AnnotationBackendTimeout on an Ingress: how long a backend may take to
	// begin its answer (a Go duration). Absent: 60s.
	AnnotationBackendTimeout = Prefix + "backend-timeout"
	// IngressClassName is the IngressClass that exists from the first start;
	// IngressController is its controller: nodes themselves.
	IngressClassName  = "dunlin"
	IngressController = Prefix + "ingress"

	// LabelIngress on a Node: "true" where Ingresses are served. Only users
	// set it: it brings the private keys of spec.tls to the node.
	LabelIngress = Prefix + "ingress"
	// LabelDead on a Node: "true" when a user declared it dead ('dunlin node
	// declare-dead').
	LabelDead = Prefix + "declared-dead"
	// LabelDuplicate on a Node: the boot id of another machine that has its
	// key (a copied disk).
	LabelDuplicate = Prefix + "duplicate-boot"

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

// ConditionDeletionBlocked of anything that has conditions and whose deletion
// waits for more than a minute says what for; its time is the deletion's.
const ConditionDeletionBlocked = Prefix + "DeletionBlocked"

// ConditionDead is the condition of a Node that was declared dead,
// ConditionRevoked of one whose key was banned.
const (
	ConditionDead    corev1.NodeConditionType = "DeclaredDead"
	ConditionRevoked corev1.NodeConditionType = "Revoked"
)

// After a restore of the cluster to an older state a node may hold what it
// has of the state that was given up: its condition ConditionHeldAfterRestore
// says so, a pod that waits for that has the reason ReasonHeldAfterRestore, and
// AnnotationAcceptRestore on the Node, with the number of the recovery epoch,
// makes it follow.
const (
	ConditionHeldAfterRestore corev1.NodeConditionType = "HeldAfterRestore"
	ReasonHeldAfterRestore                             = "HeldAfterRestore"
	AnnotationAcceptRestore                            = Prefix + "accept-restore"
)

// ConditionDraining of a pod that ends says how many connections are still
// open to its ports; its transition time is since when.
const ConditionDraining corev1.PodConditionType = Prefix + "Draining"
