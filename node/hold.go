package node

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/wire"
)

// holding is the decision about one assignment after a restore of the cluster
// to an older state: what this node has of the state that was given up stays
// until the operator says that the restored state is meant. It is pure, but
// for next, which it completes.
type holding struct {
	old  store.Assignment
	next *store.Assignment // as the control plane wants it
	lost []wire.Lost
	runs func(uid string) bool // the pod has something to lose; at a begin

	began bool // next is the first of its epoch
	// aside: the state that was restored does not go back to the epoch of old,
	// but was saved in a line that an earlier restore had given up. Which
	// versions of it this node followed, no number says.
	aside bool
	last  uint64 // what was written after the last restore is above
	held  map[string]store.Hold
	// Of held pods: whose they are, and their names.
	families, names map[string]bool
}

// hold completes next with what is held; node is the name of this node, whose
// object in next says what the operator accepted.
func hold(old store.Assignment, next *store.Assignment, lost []wire.Lost, running func() (runs func(uid string) bool), node string) {
	h := holding{
		old: old, next: next, lost: lost, began: old.Known && next.Epoch > old.Epoch,
		held: map[string]store.Hold{}, families: map[string]bool{}, names: map[string]bool{},
	}
	next.Held = nil
	if !h.began && len(old.Held) == 0 || accepted(next, node) {
		return
	}
	for _, l := range lost {
		h.last = max(h.last, l.Before)
	}
	if h.began {
		h.runs = running()
		h.aside = old.Epoch > 1 && !slices.ContainsFunc(lost, func(l wire.Lost) bool { return l.Epoch == old.Epoch })
	}
	h.pods()
	h.others()
	h.back()
	if len(h.held) > 0 {
		next.Held = h.held
	}
}

// accepted says whether the operator accepted the restore that the
// assignment's epoch began with.
func accepted(asg *store.Assignment, node string) bool {
	for _, o := range asg.Objects {
		if o.Ref.Kind == "Node" && o.Ref.Name == node {
			return metaOf(o).GetAnnotations()[manifests.AnnotationAcceptRestore] == strconv.FormatUint(asg.Epoch, 10)
		}
	}
	return false
}

// pods decides on those that run here.
func (h *holding) pods() {
	for uid, o := range h.old.Objects {
		if o.Ref.Kind != "Pod" {
			continue
		}
		offered, listed := h.next.Objects[uid]
		was := h.old.Held[uid].Kind
		unknown := was == store.HoldPod || h.began && (was == store.HoldOld || h.seen(o)) && h.runs(uid) && !deleting(o)
		switch {
		case !listed && unknown:
			h.next.Objects[uid] = o
			h.held[uid] = store.Hold{Kind: store.HoldPod}
			if pod, ok := podOf(o); ok {
				h.families[family(pod)] = true
			}
			h.names[o.Ref.Namespace+"/"+o.Ref.Name] = true
		case listed:
			// Its revision tells nothing: each report of its status gives it a
			// new one.
			h.older(o, offered, !deleting(o) && podChanged(o, offered))
		}
	}
}

// others decides on what pods refer to.
func (h *holding) others() {
	refs := make(map[wire.Ref]string, len(h.next.Objects))
	for uid, o := range h.next.Objects {
		refs[o.Ref] = uid
	}
	for uid, o := range h.old.Objects {
		if o.Ref.Kind == "Pod" || o.Ref.Kind == "Node" {
			continue
		}
		if offered, listed := h.next.Objects[uid]; listed {
			h.older(o, offered, h.revision(offered) <= h.last)
			continue
		}
		if len(h.names) == 0 || !h.began && h.old.Held[uid].Kind == 0 || deleting(o) {
			continue
		}
		if other, taken := refs[o.Ref]; taken { // made anew: before the restore, or since
			if !h.began || h.revision(h.next.Objects[other]) > h.last {
				continue
			}
			delete(h.next.Objects, other)
		}
		h.next.Objects[uid] = o
		h.held[uid] = store.Hold{Kind: store.HoldRef}
	}
}

// older keeps o where what is offered is what the restore brought back; first
// says whether it is, where o was not held before.
func (h *holding) older(o, offered wire.Object, first bool) {
	if offered.ResourceVersion == o.ResourceVersion || deleting(offered) {
		return
	}
	was := h.old.Held[o.UID]
	known := was.Kind == store.HoldOld && (h.began || offered.ResourceVersion == was.Offered)
	if known || was.Kind == 0 && h.began && h.seen(o) && first {
		h.next.Objects[o.UID] = o
		h.held[o.UID] = store.Hold{Kind: store.HoldOld, Offered: offered.ResourceVersion}
	}
}

// back decides which listed pods are not started, since a held one has their
// place: those that the restore brought back, and any of the same name.
func (h *holding) back() {
	if len(h.names) == 0 {
		return
	}
	for uid, o := range h.next.Objects {
		was := h.old.Held[uid].Kind == store.HoldBack
		_, here := h.old.Objects[uid]
		if _, held := h.held[uid]; o.Ref.Kind != "Pod" || held || here && !was {
			continue
		}
		pod, ok := podOf(o)
		sibling := ok && h.families[family(pod)] && (was || h.began)
		if sibling || h.names[o.Ref.Namespace+"/"+o.Ref.Name] {
			h.held[uid] = store.Hold{Kind: store.HoldBack}
		}
	}
}

// seen says whether the object is of a state that was given up since the
// assignment before.
func (h *holding) seen(o wire.Object) bool {
	rev := h.revision(o)
	return h.aside && rev > 0 || slices.ContainsFunc(h.lost, func(l wire.Lost) bool {
		return l.Epoch > h.old.Epoch && rev > l.After && rev <= l.Before
	})
}

// isToken tells a pod's service account token from a Secret of the cluster.
func isToken(o wire.Object) bool { return o.Ref.Kind == "Secret" && o.UID == o.Ref.Name }

// revision is the object's version in the cluster; 0 is not known.
func (h *holding) revision(o wire.Object) uint64 {
	switch {
	case o.Revision != 0:
		return o.Revision
	case o.Ref.Kind == "Pod" || isToken(o): // a hash, a token's end
		return 0
	}
	return o.ResourceVersion
}

// family is whose pod it is: of a Deployment's, the Deployment. One without a
// controller is its own.
func family(pod *corev1.Pod) string {
	kind, name := "Pod", pod.Name
	if c := metav1.GetControllerOf(pod); c != nil {
		kind, name = c.Kind, c.Name
		if hash := pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; kind == "ReplicaSet" && hash != "" {
			name = strings.TrimSuffix(name, "-"+hash)
		}
	}
	return kind + "/" + pod.Namespace + "/" + name
}

func podOf(o wire.Object) (*corev1.Pod, bool) {
	pod := &corev1.Pod{}
	return pod, direct.Unmarshal(o.Data, pod) == nil
}

// metaOf reads an object of any kind; one that cannot be read is empty.
func metaOf(o wire.Object) metav1.Object {
	u := &unstructured.Unstructured{}
	if direct.Unmarshal(o.Data, &u.Object) != nil {
		u.Object = nil
	}
	return u
}

func deleting(o wire.Object) bool { return metaOf(o).GetDeletionTimestamp() != nil }

// podChanged compares all but the status, of two that can be read.
func podChanged(a, b wire.Object) bool {
	x, ok := podOf(a)
	y, also := podOf(b)
	x.Status, y.Status = corev1.PodStatus{}, corev1.PodStatus{}
	return ok && also && !equality.Semantic.DeepEqual(x, y)
}

// heldNames are the objects that are held as they are, pods first.
func heldNames(asg *store.Assignment) []string {
	type named struct {
		kind store.HoldKind
		name string
	}
	var list []named
	for uid, hd := range asg.Held {
		if hd.Kind == store.HoldPod || hd.Kind == store.HoldOld {
			r := asg.Objects[uid].Ref
			kind, _, _ := strings.Cut(r.Kind, ".")
			list = append(list, named{hd.Kind, strings.Replace(kind+" "+r.Namespace+"/"+r.Name, " /", " ", 1)})
		}
	}
	slices.SortFunc(list, func(a, b named) int { return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.name, b.name)) })
	out := make([]string, len(list))
	for i, n := range list {
		out[i] = n.name
	}
	return out
}

// heldShown is how many held objects a message names.
const heldShown = 5

// heldText says what is held and what to do; "" is nothing.
func heldText(asg *store.Assignment, node string) string {
	names := heldNames(asg)
	if len(names) == 0 {
		return ""
	}
	list, more := strings.Join(names[:min(len(names), heldShown)], ", "), ""
	if n := len(names) - heldShown; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("the cluster was restored to a state older than what this node has: %d held as they are (%s%s).%s Apply again what shall stay; then 'dunlin node accept-restore %s' makes the node follow the restored state", len(names), list, more, unserved(asg), node)
}

// unserved says what held pods lack, of which the cluster does not know.
func unserved(asg *store.Assignment) string {
	pods, tokens := 0, 0
	for uid, hd := range asg.Held {
		switch o := asg.Objects[uid]; {
		case hd.Kind == store.HoldPod:
			pods++
		case hd.Kind == store.HoldRef && isToken(o):
			tokens++
		}
	}
	out := ""
	if pods > 0 {
		out = fmt.Sprintf(" The cluster does not know %d of these pods: Services lead to them on this node alone", pods)
		if tokens > 0 {
			out += ", and the API takes none of their service account tokens, which are not renewed"
		}
		out += "."
	}
	return out
}

// tellHeld says once that something is held, and that nothing is any more.
func (a *Agent) tellHeld(old, next *store.Assignment) {
	if maps.Equal(old.Held, next.Held) && old.Epoch == next.Epoch {
		return
	}
	a.Refresh() // the Node's condition
	text := heldText(next, a.c.NodeName)
	switch was := heldText(old, a.c.NodeName); {
	case text == was:
	case text == "":
		a.log.Info("nothing is held after the restore of the cluster any more", "epoch", next.Epoch)
		a.nodeEvent(false, "RestoreFollowed", "nothing is held after the restore of the cluster any more: the node follows it")
	case was == "" || old.Epoch != next.Epoch:
		a.log.Warn("held: "+text, "epoch", next.Epoch)
		a.nodeEvent(true, manifests.ReasonHeldAfterRestore, text)
	}
}

// heldCondition says whether something is held; ok is false in a cluster that
// was never restored.
func (a *Agent) heldCondition() (c corev1.NodeCondition, ok bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	c = corev1.NodeCondition{Type: manifests.ConditionHeldAfterRestore, Status: corev1.ConditionFalse, Reason: "Follows", Message: "the node follows the cluster as it was restored"}
	if text := heldText(&a.asg, a.c.NodeName); text != "" {
		c.Status, c.Reason, c.Message = corev1.ConditionTrue, manifests.ReasonHeldAfterRestore, text
	}
	return c, a.asg.Epoch > 1
}

// heldAs is why an object is held; 0 is not.
func (a *Agent) heldAs(uid string) store.HoldKind {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.asg.Held[uid].Kind
}

// running says of pods whether their records here have something to lose.
func (a *Agent) running() func(uid string) bool {
	recs, err := a.c.Store.Pods()
	if err != nil {
		a.log.Error("pod records cannot be read; pods that the cluster does not know count as running", "err", err)
		return func(string) bool { return true }
	}
	runs := make(map[string]bool, len(recs))
	for i := range recs {
		r := &recs[i]
		runs[r.UID] = !r.Finished && r.Verdict == nil && r.Stopping == 0
	}
	return func(uid string) bool { return runs[uid] }
}

// heldBack is why a pod is not started; nil: it is. After the operator
// accepted, one that was held back waits for the pod that has its name.
func (a *Agent) heldBack(pod *corev1.Pod, w *worker) *failure {
	if a.heldAs(string(pod.UID)) != store.HoldBack && (w == nil || !w.back || !a.nameTaken(pod)) {
		return nil
	}
	return &failure{manifests.ReasonHeldAfterRestore, fmt.Sprintf("the cluster was restored to a state older than what node %s runs, which still has this pod's place: 'dunlin node accept-restore %s' stops that and starts this pod", a.c.NodeName, a.c.NodeName)}
}
